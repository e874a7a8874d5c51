"""Who attends prompts: what `auto` makes of a trial, what is asked for in vain, and a trial with a clock of our own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fake_flashinfer
from hamburger.engine.device import load
from hamburger.engine.types.config import EngineArgs
from hamburger.model import chunk_race
from hamburger.model.chunk_race import (
    ROUNDS,
    FlashInferFails,
    PromptStep,
    Timer,
    Trial,
    Work,
    medians,
    settle_backend,
    try_flashinfer,
)
from hamburger.model.config import ConfigError, TrunkConfig
from hamburger.model.gpu.availability import Backend
from small_models import CPU, trunk_config

FIT = trunk_config(head_dim=64)
HALF = torch.bfloat16


def trial(triton: float, flashinfer: float, difference: float = 0.003) -> Callable[[], Trial]:
    return lambda: Trial({"triton": triton, "flashinfer": flashinfer}, difference)


def never() -> Trial:
    raise AssertionError("no trial was due")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(chunk_race, "why_not_installed", lambda: None)
    return monkeypatch


def test_auto_takes_the_faster(installed: pytest.MonkeyPatch) -> None:
    assert settle_backend("auto", "triton", FIT, HALF, trial(2.0, 1.5)) == (
        "flashinfer",
        "a step's prompts take 1.500 ms with FlashInfer, 2.000 ms with Triton",
    )
    assert settle_backend("auto", "triton", FIT, HALF, trial(1.5, 2.0))[0] == "triton"
    assert settle_backend("auto", "triton", FIT, HALF, trial(2.0, 2.0))[0] == "triton"


def test_whoever_asks_for_it_gets_it_however_fast_it_is(installed: pytest.MonkeyPatch) -> None:
    for times in ((2.0, 1.5), (1.5, 2.0)):
        assert settle_backend("flashinfer", "flashinfer", FIT, HALF, trial(*times))[0] == "flashinfer"


def test_nothing_is_tried_where_it_was_not_asked_for_or_is_not_there(installed: pytest.MonkeyPatch) -> None:
    assert settle_backend("torch", "torch", FIT, HALF, never) == ("torch", None)
    assert settle_backend("triton", "triton", FIT, HALF, never) == ("triton", None)
    assert settle_backend("auto", "torch", FIT, HALF, never) == ("torch", None)
    installed.setattr(chunk_race, "why_not_installed", lambda: "it is missing")
    assert settle_backend("auto", "triton", FIT, HALF, never) == ("triton", None)


def failing(error: Exception) -> Callable[[], Trial]:
    def fail() -> Trial:
        raise error

    return fail


@pytest.mark.parametrize(
    ("trunk", "dtype", "run", "reason"),
    [
        (trunk_config(head_dim=80), HALF, never, "the model's head_dim is 80, and FlashInfer takes 64, 128, 256"),
        (FIT, torch.float32, never, "dtype is float32, and FlashInfer takes bfloat16 and float16"),
        (
            FIT,
            HALF,
            failing(FlashInferFails("ninja: failed")),
            "FlashInfer fails on this machine (ninja: failed)",
        ),
        (FIT, HALF, trial(2.0, 1.0, difference=0.25), "its numbers differ from Triton's by 0.25"),
        (FIT, HALF, trial(2.0, 1.0, difference=float("nan")), "its numbers differ from Triton's by nan"),
    ],
    ids=["head_dim", "dtype", "compiler", "numbers", "nan"],
)
def test_what_speaks_against_it_is_named(
    trunk: TrunkConfig, dtype: torch.dtype, run: Callable[[], Trial], reason: str, installed: pytest.MonkeyPatch
) -> None:
    assert settle_backend("auto", "triton", trunk, dtype, run) == ("triton", f"no FlashInfer, as {reason}")
    with pytest.raises(ConfigError) as caught:
        settle_backend("flashinfer", "flashinfer", trunk, dtype, run)
    assert str(caught.value) == f"attention_backend is flashinfer, but {reason}: use auto or triton."


def test_medians_leave_the_first_round_out_and_take_turns() -> None:
    ran: list[str] = []

    def noting(name: str) -> Work:
        return lambda: ran.append(name)

    slow_start = {"triton": 0, "flashinfer": 0}

    def timer(work: Work) -> float:
        work()
        name = ran[-1]
        slow_start[name] += 1
        return 100.0 if slow_start[name] == 1 else {"triton": 3.0, "flashinfer": 1.0}[name] + slow_start[name] % 3

    names: tuple[Backend, ...] = ("triton", "flashinfer")
    assert medians({name: noting(name) for name in names}, timer) == {
        "triton": 4.0,
        "flashinfer": 2.0,
    }
    assert ran == list(names) * (ROUNDS + 1)


@pytest.mark.parametrize("max_model_len", [64, 10])
def test_both_attend_the_same_step(max_model_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter and by the fake; the clock counts calls, and says that FlashInfer needs half."""
    pytest.importorskip("triton", reason="the package triton is not installed")
    fake_flashinfer.install(monkeypatch)
    monkeypatch.setattr(chunk_race, "ROUNDS", 1)
    trunk = trunk_config(num_layers=2, head_dim=16, sliding_window=6, sliding_layers=(1,))
    found = try_flashinfer(
        trunk, HALF, CPU, PromptStep(max_slots=32, max_model_len=max_model_len, block_size=4), scripted([9, 9, 4, 2])
    )
    assert found.milliseconds == {"triton": 4, "flashinfer": 2}
    assert 0 < found.difference < 1e-2


@pytest.mark.parametrize(
    ("error", "said"),
    [(RuntimeError("ninja: failed\nand more"), "ninja: failed"), (AssertionError(), "AssertionError")],
)
def test_what_fails_in_flashinfer_is_its_own(error: Exception, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="the package triton is not installed")
    fake_flashinfer.install(monkeypatch)
    step = PromptStep(max_slots=32, max_model_len=64, block_size=4)

    def fail(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper, "plan", fail)
    with pytest.raises(FlashInferFails, match=f"^{said}$"):
        try_flashinfer(trunk_config(head_dim=16), HALF, CPU, step, scripted([]))
    monkeypatch.setattr(chunk_race, "chunk_attention_of", fail)  # Triton's comes first
    with pytest.raises(type(error)):
        try_flashinfer(trunk_config(head_dim=16), HALF, CPU, step, scripted([]))


@pytest.mark.parametrize("sliding_layers", [(0,), (1,)])
def test_every_window_is_compared(sliding_layers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="the package triton is not installed")
    fake_flashinfer.install(monkeypatch)
    plan = fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper.plan
    monkeypatch.setattr(
        fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper,
        "plan",
        lambda *args, **options: plan(*args, **options | {"window_left": -1}),
    )
    monkeypatch.setattr(chunk_race, "ROUNDS", 1)
    trunk = trunk_config(num_layers=2, head_dim=16, sliding_window=6, sliding_layers=sliding_layers)
    step = PromptStep(max_slots=32, max_model_len=64, block_size=4)
    assert try_flashinfer(trunk, HALF, CPU, step, scripted([1, 1, 1, 1])).difference > 0.1


def scripted(times: list[float]) -> Timer:
    def timer(work: Work) -> float:
        work()
        return times.pop(0)

    return timer


@pytest.mark.parametrize(
    ("settings", "backend", "expected"),
    [
        ({}, "triton", ("flashinfer", "a remark")),
        ({"attention_backend": "triton"}, "triton", ("triton", None)),
        ({"tensor_parallel_size": 2}, "triton", ("triton", None)),
        ({"tensor_parallel_size": 2, "attention_backend": "flashinfer"}, "flashinfer", ("flashinfer", "a remark")),
        ({}, "torch", ("torch", "no Triton, as the device is cpu")),
        ({"attention_backend": "torch"}, "torch", ("torch", None)),
    ],
)
def test_an_engine_settles_it_with_its_own_sizes(
    settings: dict[str, Any], backend: Backend, expected: tuple[Backend, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several ranks do not race: they could settle differently."""
    tried: list[PromptStep] = []

    def run(trunk: TrunkConfig, dtype: torch.dtype, device: torch.device, step: PromptStep, timer: Timer) -> Trial:
        tried.append(step)
        return Trial({"triton": 2.0, "flashinfer": 1.0}, 0.0)

    def settle(
        asked: str, chosen: Backend, trunk: TrunkConfig, dtype: torch.dtype, run_trial: Callable[[], Trial]
    ) -> tuple[Backend, str | None]:
        if asked == "triton":
            return chosen, None
        run_trial()
        return "flashinfer", "a remark"

    monkeypatch.setattr(load, "try_flashinfer", run)
    monkeypatch.setattr(load, "settle_backend", settle)
    step = PromptStep(max_slots=512, max_model_len=64, block_size=32)
    lines: list[str] = []
    args = EngineArgs(**settings)
    assert load._settled(args, backend, FIT, HALF, CPU, step, lines.append) == expected
    assert tried == [step] * len(lines) == [step] * (expected[0] == "flashinfer")
