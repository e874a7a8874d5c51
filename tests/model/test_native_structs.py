"""The structs of the compiled kernels and their mirrors: loading the library names what is laid out otherwise."""

from __future__ import annotations

import ctypes

import pytest

from hamburger.model.cpu import library, structs
from hamburger.model.cpu.library import load_kernels

pytestmark = pytest.mark.skipif(load_kernels() is None, reason="built without a compiler, or for another processor")
WEIGHT = structs.WeightStruct._fields_
BITS_LAST = (*WEIGHT[:2], ("outputs", ctypes.c_int32), ("inputs", ctypes.c_int64), ("bits", ctypes.c_int32))


def altered(*fields: tuple[str, type]) -> type[ctypes.Structure]:
    return type("Altered", (ctypes.Structure,), {"_fields_": fields})


@pytest.mark.parametrize(
    ("name", "mirror", "there", "here"),
    [
        ("Weight", altered(*BITS_LAST), "Weight.inputs: 4 bytes at 20", "Weight.inputs: 8 bytes at 24"),
        ("Weight", altered(WEIGHT[1], WEIGHT[0]), "Weight.data: 8 bytes at 0", "Weight.bias: 8 bytes at 0"),
        ("Weight", altered(*WEIGHT[:-1]), "Weight.bits: 4 bytes at 24", "Weight: 24 bytes"),
        ("Weight", altered(*WEIGHT, ("more", ctypes.c_int32)), "Weight: 32 bytes", "Weight.more: 4 bytes at 28"),
        ("Unknown", altered(("data", ctypes.c_void_p)), "no more of Unknown", "Unknown.data: 8 bytes at 0"),
    ],
)
def test_the_field_that_is_not_the_same_is_named(
    name: str, mirror: type[ctypes.Structure], there: str, here: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structs, f"{name}Struct", mirror, raising=False)
    with pytest.raises(RuntimeError, match=f"^The compiled kernels have '{there}' where .* has '{here}': "):
        load_kernels()


def test_a_struct_without_a_mirror_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(structs, "BatchStruct")
    with pytest.raises(RuntimeError, match=r"have 'Batch\.slots: 8 bytes at 0' where .* has 'no more of Batch'"):
        load_kernels()


def test_a_library_of_another_version_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_FORMAT", 0)
    monkeypatch.delattr(structs, "BatchStruct")
    assert load_kernels() is None
