"""Small numbers between host and device, such that neither waits for the other. On CPU there is nothing to wait for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """[len(values)] on the device; a GPU fetches it in its own time, behind what it was given before.

    torch.tensor(values, device=...) would wait there until all of that is done.
    """
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


class Download:
    """Tensors on their way to the host, all in one transfer; making it waits for nothing."""

    @torch.inference_mode()
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """tensors: int64, or of a float type that float64 holds exactly; all on one device."""
        self._like = [(tensor.shape, tensor.dtype) for tensor in tensors]
        packed = torch.cat([_as_int64(tensor).flatten() for tensor in tensors])
        self._done: torch.cuda.Event | None = None
        self._host = packed
        if packed.device.type == "cuda":
            self._host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record(torch.cuda.current_stream(packed.device))

    @torch.inference_mode()
    def wait(self) -> list[Tensor]:
        """The tensors, on the host."""
        if self._done is not None:
            self._done.synchronize()
        parts = self._host.split([shape.numel() for shape, _ in self._like])
        return [_from_int64(part, dtype).view(shape) for part, (shape, dtype) in zip(parts, self._like, strict=True)]


def _as_int64(tensor: Tensor) -> Tensor:
    """The same bits where it has 64 of them, else those of the same number in float64."""
    return tensor if tensor.dtype == torch.int64 else tensor.double().view(torch.int64)


def _from_int64(packed: Tensor, dtype: torch.dtype) -> Tensor:
    return packed if dtype == torch.int64 else packed.view(torch.float64).to(dtype)
