"""Transfers between host and device: every bit arrives, in one transfer."""

from __future__ import annotations

import torch

from hamburger.model.device.transfer import Download, Staging, pack, unpack, upload
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
        torch.tensor([[1, 2, 3], [4, 5, 6]]),
    ]
    there = [staging._take(tensor) for tensor in given]
    staging.send()
    assert staging.num_sent == 3
    for sent, tensor in zip(there, given, strict=True):
        assert sent.dtype == tensor.dtype
        assert sent.tolist() == tensor.tolist()


def test_what_is_uploaded_arrives() -> None:
    assert upload([[3, -1], [2**62, 0]], CPU).tolist() == [[3, -1], [2**62, 0]]


def test_tensors_of_all_kinds_come_back_in_one_transfer() -> None:
    tensors = [
        torch.tensor([[1, -(2**62)], [3, 4]]),
        torch.tensor([0.1, float("-inf"), -0.0]),
        torch.zeros(2, 0, 3),
        torch.tensor([[[1e-40]]], dtype=torch.float64),
        torch.tensor([1.5, 3e38], dtype=torch.bfloat16),
        torch.tensor(7),
    ]
    packed = pack(tensors)
    assert (packed.shape, packed.dtype) == ((11,), torch.int64)
    for tensor, other in [
        *zip(tensors, unpack(packed, tensors), strict=True),
        *zip(tensors, Download(tensors).wait(), strict=True),
    ]:
        assert (tensor.shape, tensor.dtype) == (other.shape, other.dtype)
        assert torch.equal(tensor, other)
        if tensor.is_floating_point():
            assert torch.equal(tensor.signbit(), other.signbit())
