"""Transfers between host and device: every bit arrives."""

import torch

from hamburger.model.device.transfer import Download, pack, unpack, upload


def test_what_is_uploaded_arrives() -> None:
    cpu = torch.device("cpu")
    assert upload([[3, -1], [2**62, 0]], cpu).tolist() == [[3, -1], [2**62, 0]]


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
