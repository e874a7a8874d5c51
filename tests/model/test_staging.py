"""Staging: all numbers of a step in one transfer, in the order and types that were put."""

from __future__ import annotations

import torch

from hamburger.model.device.staging import Staging
from small_models import CPU


def test_on_a_cpu_there_is_nothing_to_send() -> None:
    staging = Staging(CPU)
    assert staging.put([1, 2], torch.int64).tolist() == [1, 2]
    assert staging.put([], torch.float32).shape == (0,)
    staging.send()
    assert staging.num_sent == 0


def test_tensors_hold_their_values_once_they_are_sent() -> None:
    """What a GPU is given, here with a device that is the host."""
    staging = Staging(CPU, num_bytes=64)
    given = [
        torch.tensor([2**62, -1]),
        torch.tensor([0.5, -2.0, 3.25]),  # 12 bytes: the next one begins at a multiple of 8
        torch.tensor([7]),
        torch.arange(100),  # more than a piece
        torch.tensor([9.0]),
        torch.tensor([8.0]),
    ]
    there = [staging._take(tensor) for tensor in given]
    staging.send()
    assert staging.num_sent == 3
    for sent, tensor in zip(there, given, strict=True):
        assert sent.dtype == tensor.dtype
        assert sent.tolist() == tensor.tolist()
