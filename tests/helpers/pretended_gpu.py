"""A GPU where there is none: tensors that are said to be on it, and operations that mix them with the CPU's raise.

They lie on the CPU, and so does what computes them, so their numbers are right. What torch would do on a real GPU
follows from where each is said to be: another device's tensor with an axis is refused, but where it picks places out
(x[index]), and so is NumPy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from small_models import CPU

GPU = torch.device("cuda", 0)


class MixedDevicesError(RuntimeError):
    """As torch's "Expected all tensors to be on the same device"."""


@contextmanager
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`cuda` is a device, without Triton, in this context."""
    for name, value in (
        ("is_available", True),
        ("device_count", 1),
        ("get_device_capability", (9, 0)),
        ("get_device_name", "pretended"),
        ("mem_get_info", (1 << 28, 1 << 30)),
        ("memory_allocated", 0),
        ("max_memory_allocated", 0),
        ("reset_peak_memory_stats", None),
        ("empty_cache", None),
        ("set_device", None),
        ("current_stream", None),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *args, value=value: value)
    event = SimpleNamespace(record=lambda stream: None, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(nn.Parameter, "__new__", _parameter)
    with _Devices():
        yield


class _Devices(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, kwargs = func.__name__, dict(kwargs or {})
        if name in ("__get__", "__set__"):
            return _attribute(func, *args)
        if name == "to":
            return _moved(*args, **kwargs)
        if name == "cpu":
            return _placed(args[0].clone(), CPU)
        asked, of = kwargs.get("device"), [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if asked is not None and torch.device(asked).type == "cuda":
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)  # there is no GPU to copy to
        _check(name, args, of)
        found = func(*args, **kwargs)
        on_gpu = any(map(_is_on_gpu, of[:1] if name.startswith("new_") else of))
        device = torch.device(asked) if asked is not None else GPU if on_gpu else CPU
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor) and all(tensor is not own for own in of):
                _placed(tensor, device)
        return found


def _is_on_gpu(tensor: Tensor) -> bool:
    return getattr(tensor, "_is_on_gpu", False)


def _device_of(tensor: Tensor) -> torch.device:
    return GPU if _is_on_gpu(tensor) else tensor.device


def _placed(tensor: Tensor, device: torch.device) -> Tensor:
    tensor._is_on_gpu = device.type == "cuda"  # type: ignore[attr-defined]  # what is said of it
    return tensor


def _attribute(func: Any, of: Tensor, *value: Any) -> Any:
    name = func.__self__.__name__
    if not value and name in ("device", "is_cuda", "is_cpu") and _is_on_gpu(of):
        return {"device": GPU, "is_cuda": True, "is_cpu": False}[name]
    found = func(of, *value)
    if value and name == "data":
        _placed(of, _device_of(value[0]))
    return _placed(found, _device_of(of)) if isinstance(found, Tensor) else found


def _moved(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Tensor.to, whose arguments may name a device, a dtype or another tensor."""
    device = _device_of(tensor)
    others: list[Any] = []
    for value in (kwargs.pop("device", None), *args):
        if isinstance(value, Tensor):
            device = _device_of(value)
            others.append(value.dtype)
        elif isinstance(value, torch.device | str):
            device = torch.device(value)
        elif isinstance(value, torch.dtype):
            others.append(value)
    kwargs.pop("non_blocking", None)
    if device.type == "meta":
        return tensor.to(device, *others, **kwargs)
    found = tensor.to(*others, **kwargs) if others or kwargs else tensor
    if found is tensor and device == _device_of(tensor):
        return tensor
    return _placed(found.clone() if found is tensor else found, device)


def _check(name: str, args: tuple[Any, ...], tensors: list[Tensor]) -> None:
    """Raises MixedDevicesError."""
    on_gpu = [tensor for tensor in tensors if _is_on_gpu(tensor)]
    if name in ("numpy", "__array__") and on_gpu:
        raise MixedDevicesError("a GPU's tensor has no array of NumPy: .cpu() first")
    if not on_gpu or name in ("copy_", "zeros_like", "empty_like", "_has_compatible_shallow_copy_type"):
        return
    others = [tensor for tensor in tensors if not _is_on_gpu(tensor) and tensor.dim() and not tensor.is_meta]
    if name in ("__getitem__", "__setitem__"):
        indices = [leaf for leaf in tree_leaves(args[1]) if isinstance(leaf, Tensor)]
        if _is_on_gpu(args[0]) or not indices:  # without any a value is copied, wherever it is
            others = [value for value in args[2:] if indices and any(value is other for other in others)]
    if others:
        raise MixedDevicesError(f"{name} of a GPU's tensors, and of the CPU's: {[tuple(t.shape) for t in others]}")


_plain_parameter = nn.Parameter.__new__


def _parameter(cls: type[nn.Parameter], data: Tensor | None = None, requires_grad: bool = True) -> nn.Parameter:
    made: nn.Parameter = _plain_parameter(cls, data, requires_grad)
    if data is not None:
        _placed(made, _device_of(data))
    return made
