"""Which GPU is the current one."""

from __future__ import annotations

import pytest
import torch

from hamburger.model.device.devices import make_current


def test_a_gpu_without_a_number_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="specified index"):
        torch.cuda.set_device(torch.device("cuda"))  # torch's own, with a GPU or without
    make_current(torch.device("cuda"))
    made: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", made.append)
    for name in ("cpu", "cuda", "cuda:1"):
        make_current(torch.device(name))
    assert made == [torch.device("cuda:1")]
