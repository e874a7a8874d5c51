"""Whole engines on a pretended GPU: no step mixes its tensors with the host's, whatever requests ask, and the texts are
the CPU's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from drafted import eager_drafts
from graph_cores import MODELS, assert_same, graphs_core, guided, requests
from hamburger.engine.types.settling import Settling
from hamburger.model.graphs.capture import EagerCapture
from playing import play
from pretended_gpu import GPU, MixedDevicesError, pretended_gpu
from slow_cases import slow_but
from small_models import CPU, core_of, random_model


def test_mixed_devices_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pretended_gpu(monkeypatch):
        ours, theirs, index = torch.ones(3, device=GPU), torch.ones(3), torch.tensor([0, 2])
        assert (ours[index] + theirs.to(GPU)[:2] + torch.tensor(1.0)).device == GPU
        for mixing in (
            lambda: ours + theirs,
            lambda: theirs[index.to(GPU)],
            lambda: ours.index_select(0, index),
            lambda: ours.numpy(),
            lambda: ours.__setitem__(index, theirs[:2]),
        ):
            with pytest.raises(MixedDevicesError):
                mixing()


@pytest.mark.parametrize("name", slow_but(["positions"], MODELS))
def test_groups_of_requests_of_every_kind(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = guided(requests(len(name)))
    with pretended_gpu(monkeypatch):
        model = random_model(MODELS[name], seed=2, device=GPU)
        assert model.device == GPU
        found = play(graphs_core(model, EagerCapture(), 400, overlap=True), asked, at_once=1, every=3).outputs
    core = graphs_core(random_model(MODELS[name], seed=2, static_shapes=True), EagerCapture(), 400)
    assert_same(found, play(core, asked, at_once=1, every=3).outputs)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
def test_drafts_and_settled_slots(kv_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    shares = torch.tensor([[1, 0], [3, 2], [0, 0], [1, 1]])
    long = [
        replace(request, params=replace(request.params, max_tokens=40, ignore_eos=True)) for request in requests(5)[:5]
    ]

    def answers(device: torch.device) -> Any:
        model = random_model(MODELS["fused"], seed=2, device=device, static_shapes=True)
        core = core_of(
            model,
            policy=eager_drafts(model),
            kv_dtype=kv_dtype,
            settling=Settling(window=6, growth=0.0, keep=1 / 2, chunk=8, apart=4),
            shares=shares,
        )
        return play(core, long, at_once=1, every=2).tokens

    with pretended_gpu(monkeypatch):
        found = answers(GPU)
    assert found == answers(CPU)


def test_each_step_makes_its_models_gpu_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another model may have been loaded onto another GPU since, and a thread begins with the first."""
    with pretended_gpu(monkeypatch):
        core = core_of(random_model(MODELS["plain_base"], device=GPU))
        current: list[torch.device] = []
        monkeypatch.setattr(torch.cuda, "set_device", current.append)
        steps = play(core, requests(1)[:1]).seen["steps"]
    assert current == [GPU] * steps
