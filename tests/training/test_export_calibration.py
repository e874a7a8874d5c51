"""Export with --calibrate: the dial becomes true, on data that fit the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from exported_runs import CONFIG, assert_equal, loaded_model, options, tensors_of, write_step
from hamburger.model.checkpoints.load import load_checkpoint
from hamburger.model.checkpoints.sources import resolve_source
from hamburger.training.corpus.dataset import Example, SegmentedDataset
from hamburger.training.corpus.dataset_writer import DatasetWriter
from hamburger.training.errors import TrainingError
from hamburger.training.export.calibrate import collect
from hamburger.training.export.export import _spread, export, held_back
from hamburger.training.recipe import Recipe
from hamburger.training.run.train import _split
from small_models import core_of, params, run_core, steps_of, tokens_of
from training_runs import dataset_meta


@pytest.fixture
def step(tmp_path: Path) -> Path:
    return write_step(tmp_path)


def data_set(folder: Path, step: Path, number: int = 40, max_group: int = 4) -> SegmentedDataset:
    """The model's own answers in its own groups; how sure the base is of a token depends on the token."""
    model = loaded_model(step)
    sampling = params(confidence=0.0, ignore_eos=True, max_tokens=16)
    requests = {str(i): ([2 + i, 5 + i, 3], sampling) for i in range(number)}
    examples = []
    for i, outputs in run_core(core_of(steps_of(model)), requests).items():
        answer = tokens_of(outputs)
        ids = torch.tensor([*requests[i][0], *answer])
        sure = 0.05 + 0.9 * (ids[3:] % 7) / 7
        rivals = torch.stack((ids[3:], (ids[3:] + 1) % 96), 1)
        sizes = [1, 1, 1] + [s for o in outputs for s in (len(o.token_ids), *[0] * (len(o.token_ids) - 1))]
        response = torch.arange(len(ids)) >= 3
        logprobs = torch.stack((sure, 1 - sure), 1).log().half()
        group_sizes = torch.tensor(sizes, dtype=torch.uint8)
        entropy = torch.zeros(len(ids))
        examples.append(Example(i, i, ids.int(), response, entropy, group_sizes, rivals.int(), logprobs))
    with DatasetWriter(folder, dataset_meta(max_group=max_group)) as writer:
        writer.write(examples)
    return SegmentedDataset(folder)


def test_calibration_makes_the_dial_true(step: Path, tmp_path: Path) -> None:
    data_set(tmp_path / "data", step)
    out = tmp_path / "exported"
    text = export(options(step, out, calibrate=tmp_path / "data", data=[tmp_path / "data"], device="cpu"))
    assert text is not None
    checkpoint = load_checkpoint(resolve_source(str(out)), torch.float32)
    graft = checkpoint.config.graft
    assert graft is not None
    assert graft.stop_scale is not None
    assert graft.stop_bias is not None
    decisions = collect(loaded_model(out), SegmentedDataset(tmp_path / "data").examples())
    dial = 1 - (decisions.logits * torch.tensor(graft.stop_scale[:3]) + torch.tensor(graft.stop_bias[:3])).sigmoid()
    assert decisions.decided.all()
    torch.testing.assert_close(dial.mean(0), decisions.base_probs.mean(0), atol=0.01, rtol=0)
    card = (out / "MODEL_CARD.md").read_text()
    assert text in card
    assert "40 conversations, 640 answer tokens; scored by tiny" in card
    # Weights and everything else are those of an export without it.
    assert_equal(checkpoint.tensors, tensors_of(step))
    assert replace(graft, stop_scale=None, stop_bias=None) == CONFIG.graft


def test_calibrating_on_what_a_run_kept_back(step: Path, tmp_path: Path) -> None:
    data = data_set(tmp_path / "data", step, number=80)
    kept = held_back(data, 0.3)
    expected = _split(Recipe(validation_share=0.3), [data], None).held_out
    assert [data.example(i).id for i in kept] == [example.id for example in expected]
    assert 0 < len(kept) < len(data)
    text = export(options(step, tmp_path / "exported", calibrate=tmp_path / "data", held_back=True))
    assert text is not None
    assert f"| 1 | {4 * len(kept)} |" in text
    (step.parent / "recipe.yaml").unlink()
    with pytest.raises(TrainingError, match="--held-back needs the run's recipe"):
        export(options(step, tmp_path / "again", calibrate=tmp_path / "data", held_back=True))


def test_too_few_decisions_do_not_calibrate(step: Path, tmp_path: Path) -> None:
    data_set(tmp_path / "data", step, number=2)
    with pytest.raises(TrainingError, match="data decides fewer than 50 times at each place of a group, so nothing is"):
        export(options(step, tmp_path / "exported", calibrate=tmp_path / "data"))
    assert not (tmp_path / "exported").exists()


def test_held_back_says_nothing_without_data_to_calibrate_on(step: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"--held-back .*: add --calibrate DATA, or leave out --held-back"):
        export(options(step, tmp_path / "exported", held_back=True))
    assert not (tmp_path / "exported").exists()


def test_data_of_another_model_do_not_calibrate(step: Path, tmp_path: Path) -> None:
    data_set(tmp_path / "data", step, number=2, max_group=5)
    with pytest.raises(TrainingError, match="groups of up to 5 tokens"):
        export(options(step, tmp_path / "exported", calibrate=tmp_path / "data"))


def test_verified_groups_are_said_and_calibrated_in_slots_of_one_token(step: Path, tmp_path: Path) -> None:
    data = data_set(tmp_path / "data", step)
    out = tmp_path / "exported"
    assert export(options(step, out, calibrate=tmp_path / "data", groups="verified", device="cpu")) is not None
    graft = load_checkpoint(resolve_source(str(out)), torch.float32).config.graft
    assert graft is not None
    assert (graft.groups, CONFIG.graft and CONFIG.graft.groups) == ("verified", "composed")
    decisions = collect(loaded_model(out), data.examples(), verified=True)
    assert len(decisions.logits) == data.num_response_tokens  # each token begins a group
    dial = 1 - (decisions.logits * torch.tensor(graft.stop_scale[:3]) + torch.tensor(graft.stop_bias[:3])).sigmoid()  # type: ignore[index]
    for place in range(3):
        on = decisions.decided[:, place]
        torch.testing.assert_close(dial[on, place].mean(), decisions.base_probs[on, place].mean(), atol=0.02, rtol=0)


@pytest.mark.parametrize(("max_tokens", "expected"), [(640, 40), (400, 25), (16, 1), (1000, 40)])
def test_examples_are_drawn_from_all_over_the_set(step: Path, tmp_path: Path, max_tokens: int, expected: int) -> None:
    data = data_set(tmp_path / "data", step)  # 40 examples of 16 tokens
    chosen = [int(example.id) for example in _spread(data, range(40), max_tokens)]
    assert len(chosen) == expected
    assert chosen == [int(i * 40 / expected) for i in range(expected)]
