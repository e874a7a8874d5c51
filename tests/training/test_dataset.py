"""The data set on disk: what is written is read, and what is damaged is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hamburger.training.corpus.dataset import DatasetMeta, Example, SegmentedDataset, read_meta
from hamburger.training.corpus.dataset_writer import DatasetWriter
from hamburger.training.errors import TrainingError
from training_runs import dataset_meta

META = dataset_meta(vocab_size=50)
_FIELDS = ("token_ids", "response", "entropy", "group_sizes", "top_ids", "top_logprobs", "states")


def example(number: int, num_prompt: int, groups: list[int], k: int = 2, *, states: bool = False) -> Example:
    """An example with random content."""
    draw = torch.Generator().manual_seed(number)
    rows = sum(groups)
    n = num_prompt + rows
    response = torch.arange(n) >= num_prompt
    sizes = [1] * num_prompt + [i for size in groups for i in (size, *[0] * (size - 1))]
    return Example(
        f"p{number}",
        f"key{number}",
        torch.randint(50, (n,), generator=draw, dtype=torch.int32),
        response,
        torch.rand(n, generator=draw) * response,
        torch.tensor(sizes, dtype=torch.uint8),
        torch.randint(50, (rows, k), generator=draw, dtype=torch.int32) if k else None,
        -torch.rand((rows, k), generator=draw).half() if k else None,
        torch.randn((rows, 3, 4), generator=draw).bfloat16() if states else None,
    )


def equal(one: Example, two: Example) -> bool:
    def same(a: Tensor | None, b: Tensor | None) -> bool:
        return a is b is None or (a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b))

    names = (one.id, one.key) == (two.id, two.key)
    return names and all(same(getattr(one, name), getattr(two, name)) for name in _FIELDS)


def write(folder: Path, *parts: list[Example], meta: DatasetMeta = META) -> SegmentedDataset:
    with DatasetWriter(folder, meta) as writer:
        for part in parts:
            writer.write(part)
    return SegmentedDataset(folder)


@settings(max_examples=30)
@given(
    st.lists(st.lists(st.tuples(st.integers(1, 5), st.lists(st.integers(1, 4), max_size=4)), min_size=1), max_size=3),
    st.booleans(),
)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[list[tuple[int, list[int]]]], states: bool
) -> None:
    parts = [[example(i, *shape, states=states) for i, shape in enumerate(part)] for part in shapes]
    dataset = write(tmp_path_factory.mktemp("set"), *parts)
    written = [e for part in parts for e in part]
    assert len(dataset) == len(written)
    assert all(equal(dataset.example(i), e) for i, e in enumerate(written))
    assert [e.id for e in dataset.examples()] == [e.id for e in written]
    assert dataset.num_tokens == sum(len(e.token_ids) for e in written)
    assert dataset.num_response_tokens == sum(e.num_response_tokens for e in written)
    assert dataset.keys == {e.key for e in written}


def test_counts_of_an_example() -> None:
    one = example(0, 3, [2, 1, 4])
    assert (one.num_response_tokens, one.num_response_groups) == (7, 3)


def test_teacher_and_states_are_optional(tmp_path: Path) -> None:
    meta = replace(META, top_k=0)
    dataset = write(tmp_path, [example(0, 2, [1, 2], k=0)], meta=meta)
    assert dataset.example(0).top_ids is dataset.example(0).top_logprobs is dataset.example(0).states is None


def test_reading_leaves_the_tokens_on_disk(tmp_path: Path) -> None:
    dataset = write(tmp_path, [example(i, 2, [3]) for i in range(3)])
    first, second = dataset.example(0), dataset.example(1)
    offset = second.token_ids.data_ptr() - first.token_ids.data_ptr()
    assert offset == first.token_ids.nbytes  # both are views of the one part, not copies


def test_a_folder_grows_part_by_part(tmp_path: Path) -> None:
    write(tmp_path, [example(0, 1, [1])], [example(1, 1, [2])])
    (tmp_path / "part-00002.tmp").write_bytes(b"half a part")
    dataset = write(tmp_path, [example(2, 1, [3])])
    assert [e.id for e in dataset.examples()] == ["p0", "p1", "p2"]
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != "") == [
        "meta.json",
        *(f"part-0000{i}.safetensors" for i in range(3)),
    ]


def test_another_recipe_needs_another_folder(tmp_path: Path) -> None:
    write(tmp_path, [example(0, 1, [1])])
    with pytest.raises(TrainingError, match=r"was made with ratio 0\.3, not 0\.5: repeat"):
        DatasetWriter(tmp_path, replace(META, ratio=0.5))
    DatasetWriter(tmp_path, replace(META, model_argument="elsewhere")).close()
    assert read_meta(tmp_path) == META


def test_an_empty_data_set_takes_other_settings(tmp_path: Path) -> None:
    DatasetWriter(tmp_path, META).close()
    DatasetWriter(tmp_path, replace(META, ratio=0.5)).close()
    assert read_meta(tmp_path) == replace(META, ratio=0.5)
    (tmp_path / "meta.json").write_text('{"somebody": "else"}')
    with pytest.raises(TrainingError, match=r"meta\.json cannot be used"):
        DatasetWriter(tmp_path, META)
    assert (tmp_path / "meta.json").read_text() == '{"somebody": "else"}'


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensors: object, path: Path, metadata: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("hamburger.model.checkpoints.weight_files.save_file", full)
    with DatasetWriter(tmp_path, META) as writer, pytest.raises(OSError, match=r"00000\.tmp .*: No space left"):
        writer.write([example(0, 1, [1])])
    assert not list(tmp_path.glob("part-*"))


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path, META), pytest.raises(TrainingError, match="another process"):
        DatasetWriter(tmp_path, META)


def test_parts_are_not_overwritten_without_their_recipe(tmp_path: Path) -> None:
    write(tmp_path, [example(0, 1, [1])])
    (tmp_path / "meta.json").unlink()
    with pytest.raises(TrainingError, match=r"has parts but no meta\.json"):
        DatasetWriter(tmp_path, META)
    with pytest.raises(TrainingError, match="is no data set"):
        SegmentedDataset(tmp_path)


def test_what_others_have_in_the_folder_stays(tmp_path: Path) -> None:
    (tmp_path / "notes.tmp").write_text("mine")
    (tmp_path / "part-00001.tmp").write_text("cut off")
    DatasetWriter(tmp_path, META).close()
    assert (tmp_path / "notes.tmp").read_text() == "mine"
    assert not (tmp_path / "part-00001.tmp").exists()
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    with pytest.raises(TrainingError, match="is a model's folder"):
        DatasetWriter(model, META)
    assert [path.name for path in model.iterdir()] == ["config.json"]


@pytest.mark.parametrize("text", ["{", "[]", '{"format": "x", "version": 1}', '{"version": 1}'])
def test_a_wrong_meta_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "meta.json").write_text(text)
    with pytest.raises(TrainingError, match=r"meta\.json cannot be used"):
        SegmentedDataset(tmp_path)


def test_a_meta_file_of_another_version_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    values = json.loads((tmp_path / "meta.json").read_text())
    (tmp_path / "meta.json").write_text(json.dumps({**values, "version": 2}))
    with pytest.raises(TrainingError, match="hamburger-segmented 2, not hamburger-segmented 1"):
        SegmentedDataset(tmp_path)


@pytest.mark.parametrize("index", [-1, 2])
def test_an_example_that_is_not_there(tmp_path: Path, index: int) -> None:
    dataset = write(tmp_path, [example(0, 1, [1]), example(1, 1, [1])])
    with pytest.raises(TrainingError, match="has 2 examples"):
        dataset.example(index)


def test_a_part_needs_examples(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path, META) as writer, pytest.raises(TrainingError, match="at least one"):
        writer.write([])


def _damage(tensors: dict[str, Tensor], kind: str) -> None:
    match kind:
        case "lacks entropy":
            del tensors["entropy"]
        case "lacks top_logprobs":
            del tensors["top_logprobs"]
        case "wrong type":
            tensors["token_ids"] = tensors["token_ids"].long()
        case "unknown":
            tensors["extra"] = torch.zeros(1)
        case "do not run from 0":
            tensors["starts"][1] = tensors["starts"][-1]
        case "one id and one key":
            tensors["starts"] = tensors["starts"][[0, -1]]
        case "differ in length":
            tensors["entropy"] = tensors["entropy"][1:].clone()
        case "one row":
            tensors["top_ids"] = tensors["top_ids"][1:].clone()
        case "token ids outside":
            tensors["token_ids"][0] = 50
        case "do not tile":
            tensors["group_sizes"][0] = 0
        case "more than 4 tokens":
            tensors["group_sizes"][-5:] = torch.tensor([5, 0, 0, 0, 0])
            tensors["response"][-5:] = True


@pytest.mark.parametrize(
    "kind",
    [
        "lacks entropy",
        "lacks top_logprobs",
        "wrong type",
        "unknown",
        "do not run from 0",
        "one id and one key",
        "differ in length",
        "one row",
        "token ids outside",
        "do not tile",
        "more than 4 tokens",
    ],
)
def test_a_damaged_part_is_named(tmp_path: Path, kind: str) -> None:
    write(tmp_path, [example(0, 2, [2, 3]), example(1, 2, [1, 4])])
    path = tmp_path / "part-00000.safetensors"
    tensors = load_file(path)
    _damage(tensors, kind)
    save_file(tensors, path, {"ids": '["a", "b"]', "keys": '["a", "b"]'})
    with pytest.raises(TrainingError, match=rf"part-00000\.safetensors is damaged: .*{kind}.* Remove it"):
        SegmentedDataset(tmp_path)


def test_groups_never_reach_over_a_border(tmp_path: Path) -> None:
    write(tmp_path, [example(0, 1, [1, 1]), example(1, 1, [1, 1])])
    path = tmp_path / "part-00000.safetensors"
    tensors = load_file(path)
    for sizes in ([1, 1, 2, 0, 1, 1], [2, 0, 1, 1, 1, 1]):  # into the next example; a prompt's token
        tensors["group_sizes"] = torch.tensor(sizes, dtype=torch.uint8)
        save_file(tensors, path, {"ids": '["a", "b"]', "keys": '["a", "b"]'})
        with pytest.raises(TrainingError, match="do not tile"):
            SegmentedDataset(tmp_path)


@pytest.mark.parametrize("keep", [0, 100])
def test_a_part_that_was_cut_off_is_named(tmp_path: Path, keep: int) -> None:
    write(tmp_path, [example(0, 2, [2, 3])])
    path = tmp_path / "part-00000.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(TrainingError, match="is damaged: it cannot be read"):
        SegmentedDataset(tmp_path)


def test_a_part_without_ids_is_named(tmp_path: Path) -> None:
    write(tmp_path, [example(0, 2, [2, 3])])
    path = tmp_path / "part-00000.safetensors"
    metadata: dict[str, Any] = {"keys": "[]"}
    save_file(load_file(path), path, metadata)
    with pytest.raises(TrainingError, match="is damaged"):
        SegmentedDataset(tmp_path)
