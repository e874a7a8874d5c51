"""Small numbers between host and device, such that neither waits for the other. On CPU there is nothing to wait for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(values: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """int64 [len(values), *] on the device; a GPU fetches it in its own time, behind what it was given before.

    torch.tensor(values, device=...) would wait there until all of that is done.
    """
    if device.type == "cpu":
        return torch.tensor(values)
    return torch.tensor(values, pin_memory=True).to(device, non_blocking=True)


class Download:
    """Tensors on their way to the host, all in one transfer; making it waits for nothing."""

    @torch.inference_mode()
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """tensors: int64, or of a float type that float64 holds exactly; all on one device."""
        self._tensors = tensors
        self._done: torch.cuda.Event | None = None
        if tensors[0].device.type != "cpu":
            packed = pack(tensors)
            self._host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record(torch.cuda.current_stream(packed.device))

    @torch.inference_mode()
    def wait(self) -> list[Tensor]:
        """The tensors, on the host."""
        if self._done is None:
            return list(self._tensors)
        self._done.synchronize()
        return unpack(self._host, self._tensors)


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """int64 [n]: all numbers of these tensors, one after the other; a float as the bits of the same in float64."""
    return torch.cat(
        [t.flatten() if t.dtype == torch.int64 else t.double().flatten().view(torch.int64) for t in tensors]
    )


def unpack(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """What was packed; like: tensors of its shapes and dtypes, in order."""
    parts = zip(packed.split([tensor.numel() for tensor in like]), like, strict=True)
    return [
        (part if of.dtype == torch.int64 else part.view(torch.float64).to(of.dtype)).view(of.shape)
        for part, of in parts
    ]
