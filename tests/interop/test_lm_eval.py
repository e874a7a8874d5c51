"""lm_eval over HTTP scores the served model as its own `hf` model scores the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from client_programs import Clients
from real_server import RealServer

pytestmark = [pytest.mark.interop, pytest.mark.timeout(1200)]
SCORED = ["arc_easy_local", "lambada_local", "gsm8k_local"]
ANSWERED = ["gsm8k_local"]


class Harness:
    def __init__(self, clients: Clients, folder: Path) -> None:
        self.clients, self.folder = clients, folder

    def scores(self, name: str, model: str, model_args: str, tasks: list[str], *options: str) -> dict[str, float]:
        """Task and metric -> score."""
        out = self.folder / name
        self.clients.run(
            "lm_eval", "run", "--model", model, "--model_args", model_args, "--include_path", "tasks",
            "--tasks", ",".join(tasks), "--output_path", str(out), *options,
        )  # fmt: skip
        (results,) = out.rglob("results_*.json")
        found: dict[str, Any] = json.loads(results.read_text())["results"]
        return {
            f"{task} {metric.partition(',')[0]}": value
            for task, values in found.items()
            for metric, value in values.items()
            if isinstance(value, float) and "stderr" not in metric and metric != "sample_len"
        }


@pytest.fixture(scope="module")
def harness(clients: Clients, tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return Harness(clients, tmp_path_factory.mktemp("lm_eval"))


@pytest.fixture(scope="module")
def own(harness: Harness, base_folder: Path) -> dict[str, float]:
    """What lm_eval's hf model scores."""
    found = harness.scores("hf", "hf", f"pretrained={base_folder},dtype=float32", SCORED, "--device", "cpu")
    assert {name.split()[0] for name in found} == set(SCORED)
    assert 0.2 < found["arc_easy_local acc"] < 0.9  # the model is better than chance, and the rows are no constant
    return found


def assert_same(found: dict[str, float], own: dict[str, float]) -> None:
    """To within half a point; a perplexity to within half a percent."""
    for name, score in own.items():
        tolerance = 0.005 * score if "perplexity" in name else 0.005
        assert found[name] == pytest.approx(score, abs=tolerance), name


@pytest.mark.parametrize(
    ("num_concurrent", "tokenizer"), [(1, "huggingface"), (8, "huggingface"), (8, "remote")], ids=lambda v: str(v)
)
def test_local_completions(
    harness: Harness, base: RealServer, base_folder: Path, own: dict[str, float], num_concurrent: int, tokenizer: str
) -> None:
    model_args = f"model=base,base_url={base.url}/v1/completions,num_concurrent={num_concurrent}"
    model_args += f",tokenizer_backend={tokenizer},tokenizer={base_folder}"
    found = harness.scores(f"completions-{num_concurrent}-{tokenizer}", "local-completions", model_args, SCORED)
    assert_same(found, own)


def test_prompts_in_batches_score_the_same(
    harness: Harness, base: RealServer, base_folder: Path, own: dict[str, float]
) -> None:
    model_args = f"model=base,base_url={base.url}/v1/completions,tokenizer={base_folder}"
    found = harness.scores("batches", "local-completions", model_args, SCORED[:2], "--batch_size", "8")
    assert_same(found, {name: score for name, score in own.items() if "gsm8k" not in name})


@pytest.fixture(scope="module")
def own_chat(harness: Harness, base_folder: Path) -> dict[str, float]:
    options = ("--device", "cpu", "--apply_chat_template")
    return harness.scores("hf-chat", "hf", f"pretrained={base_folder},dtype=float32", ANSWERED, *options)


@pytest.mark.parametrize("num_concurrent", [1, 8])
def test_local_chat_completions(
    harness: Harness, base: RealServer, own_chat: dict[str, float], num_concurrent: int
) -> None:
    model_args = f"model=base,base_url={base.url}/v1/chat/completions,num_concurrent={num_concurrent}"
    found = harness.scores(
        f"chat-{num_concurrent}", "local-chat-completions", model_args, ANSWERED, "--apply_chat_template"
    )
    assert_same(found, own_chat)


def test_a_hamburger_is_scored_at_the_confidence_that_its_name_says(harness: Harness, composed: RealServer) -> None:
    model_args = f"model=smollm2-135m-hamburger@0.3,base_url={composed.url}/v1/completions,num_concurrent=8"
    slots = composed.metric("hamburger_kv_slots_total", 'kind="generated"')
    tokens = composed.metric("hamburger_generation_tokens_total")
    found = harness.scores("burger", "local-completions", f"{model_args},tokenizer_backend=remote", ANSWERED)
    assert set(found) == {"gsm8k_local exact_match"}
    made = composed.metric("hamburger_generation_tokens_total") - tokens
    assert made > 1.2 * (composed.metric("hamburger_kv_slots_total", 'kind="generated"') - slots) > 0
