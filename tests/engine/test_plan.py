"""`hamburger plan` foretells what the engine does: its weights, its pool, the slots of a request, who runs at once."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest

from hamburger.engine.build import build_core
from hamburger.engine.drafting.costs import MeasuredCosts
from hamburger.engine.plan.known_shapes import PRESETS
from hamburger.engine.plan.plan import Load, Machine, make_plan
from hamburger.engine.plan.shape import shape_of
from hamburger.engine.types.config import EngineArgs, KVCacheDtype, Quantization
from hamburger.engine.types.messages import SubmitRequest
from hamburger.engine.types.settling import Settling
from hamburger.model.checkpoints.load import save_checkpoint
from hamburger.model.checkpoints.sources import BUILTIN, embedded_gguf
from hamburger.model.config import ConfigError, ModelConfig
from hamburger.server.cli import main
from planning import GRAFTED, PLAIN, POOL, command, plan, refused
from slow_cases import slow
from small_models import core_of, graft_config, params, plain_model, random_model, random_tensors, trunk_config
from verified import free_rows


@pytest.mark.parametrize("short_list_size", [None, 32])
def test_weights_are_what_a_loaded_model_holds(short_list_size: int | None) -> None:
    config = ModelConfig(trunk=trunk_config(), graft=graft_config(short_list_size=short_list_size))
    held = sum(tensor.nbytes for tensor in plain_model(config).state_dict().values())
    if short_list_size is not None:  # its head is a copy of the whole one's rows
        held += short_list_size * config.trunk.hidden_size * 4
    assert shape_of("m", config, "float32").weights_bytes == held


@pytest.mark.parametrize(
    ("quantization", "kv_cache_dtype", "max_loras"),
    [slow("none", "auto", 0), ("none", "int8", 0), slow("none", "auto", 7), ("auto", "auto", 7)],
)
def test_the_engine_sizes_its_pool_as_planned(
    quantization: Quantization,
    kv_cache_dtype: KVCacheDtype,
    max_loras: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = ["--quantization", quantization, "--kv-cache-dtype", kv_cache_dtype, "--device", "cpu"]
    weights = command(capsys, "builtin", *options, "--kv-cache-memory", "1GiB")["weights_bytes"]
    memory = weights + 2 * 10**9
    monkeypatch.setattr("hamburger.engine.device.memory.available_host_bytes", lambda: memory - weights)
    # What steps take here is no part of it, and seconds to measure.
    free = MeasuredCosts(rows=(1, 2), steps=(1.0, 1.0), micro_steps=(0.0, 0.0))
    monkeypatch.setattr("hamburger.engine.build.measure_costs", lambda *_: free)
    args = EngineArgs(
        model="builtin", dtype="bfloat16", device="cpu", quantization=quantization, kv_cache_dtype=kv_cache_dtype,
        max_loras=max_loras,
    )  # fmt: skip
    _, info = build_core(args)
    options += ["--memory", str(memory), "--max-num-seqs", "64"]
    found = command(capsys, "builtin", *options, "--max-loras", str(max_loras))
    assert found["pool_slots"] == info.total_slots
    assert found["max_model_len"] == info.max_model_len
    assert found["model"] == info.model


@pytest.mark.parametrize(("confidence", "tokens_per_kv"), [(1.0, 1.0), (0.0, 4.0)])
def test_a_request_holds_the_slots_that_are_planned(confidence: float, tokens_per_kv: float) -> None:
    core = core_of(random_model(GRAFTED), block_size=1)
    sampling = params(confidence=confidence, max_tokens=16, ignore_eos=True)
    core.add(SubmitRequest("a", list(range(2, 22)), sampling, 0.0))
    used, tokens, groups = 0, 0, 0
    while core.has_work:
        stats = core.step().stats
        assert stats is not None
        used = max(used, stats.used_slots)
        tokens, groups = tokens + sum(stats.group_sizes), groups + len(stats.group_sizes)
    assert tokens / groups == tokens_per_kv
    shape = shape_of("m", GRAFTED, "float32")
    load = Load(prompt_tokens=20, output_tokens=16, tokens_per_kv=tokens_per_kv, block_size=1)
    planned = make_plan(shape, Machine(kv_cache_memory=2**30), load)
    # The last group's slot is counted, but never written; that before it is freed when the last step is reported.
    assert used == planned.slots_per_request - 2


@pytest.mark.parametrize("tokens", [40, 100, 111])
def test_an_answer_that_settles_holds_the_slots_that_are_planned(tokens: int) -> None:
    settling = Settling(window=20, keep=1 / 4, growth=1 / 4, chunk=16, apart=8)
    core = core_of(
        random_model(PLAIN), block_size=1, num_blocks=200, max_model_len=140, settling=settling, policy=free_rows(0)
    )
    core.add(SubmitRequest("a", list(range(2, 22)), params(max_tokens=tokens, ignore_eos=True, confidence=1.0), 0.0))
    used, last = 0, 0
    while core.has_work:
        outputs = core.step()
        assert outputs.stats is not None
        used = max(used, outputs.stats.used_slots)
        last = tokens - outputs.outputs[0].dropped_slots if outputs.outputs else last
    load = Load(prompt_tokens=20, output_tokens=tokens, block_size=1, settling=settling)
    planned = make_plan(shape_of("m", PLAIN, "float32"), Machine(kv_cache_memory=2**30), load)
    assert planned.tokens_per_kv == tokens / last
    # The last token's slot is counted, but never written; that before it is freed when the last step is reported.
    assert planned.slots_per_request - 2 <= used <= planned.slots_per_request


def test_seats_limit_the_pool_as_they_do_in_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--kv-cache-memory", "1GiB", "--max-model-len", "100", "--prompt-tokens", "50", "--output-tokens", "50"]
    found = command(capsys, "builtin", *options, "--max-num-seqs", "3")
    assert found["pool_slots"] == 3 * 128  # 100 slots take 4 blocks of 32
    assert found["concurrent_requests"] == 3
    assert command(capsys, "builtin", *options)["concurrent_requests"] > 3


def test_adapters_take_memory_before_the_pool_does(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["llama-3.2-1b", "--memory", "8GiB", "--max-model-len", "8192"]
    without, found = command(capsys, *options), command(capsys, *options, "--max-loras", "4", "--max-lora-rank", "16")
    # Ranks of q, k, v and of gate, up lie side by side; each linear is read by its inputs and written to its outputs.
    numbers = 3 * (2048 + 3072) + (2048 + 2048) + 2 * (2048 + 16384) + (8192 + 2048)
    assert found["loras_bytes"] == 4 * 16 * numbers * 16 * 2
    block = 32 * found["slot_bytes"]
    assert without["pool_bytes"] - found["pool_bytes"] == pytest.approx(0.9 * found["loras_bytes"], abs=block)
    assert found["weights_bytes"] == without["weights_bytes"]
    assert without["loras_bytes"] == 0
    assert main(["plan", *options, "--max-loras", "4"]) == 0
    assert "LoRA adapters         0.51 GiB" in capsys.readouterr().out


def test_a_folder_needs_no_weights(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    save_checkpoint(tmp_path, GRAFTED, random_tensors(GRAFTED))
    (tmp_path / "model.safetensors").unlink()
    load = ["--kv-cache-memory", "1MiB", "--prompt-tokens", "60", "--output-tokens", "40", "--tokens-per-kv", "2"]
    found = command(capsys, str(tmp_path), *load)
    assert found["parameters"] == sum(math.prod(t.shape) for t in random_tensors(GRAFTED).values())
    assert (found["slots_per_request"], found["slots_per_request_plain"]) == (80, 100)
    shutil.copy(BUILTIN / "config.json", tmp_path)  # a Hugging Face folder
    assert command(capsys, str(tmp_path), "--kv-cache-memory", "1GiB")["slot_bytes"] == 2 * 30 * 3 * 64 * 2


def test_a_gguf_file_says_its_shape_itself(capsys: pytest.CaptureFixture[str]) -> None:
    file, builtin = (command(capsys, model, *POOL) for model in (str(embedded_gguf()), "builtin"))
    assert file.pop("model") != builtin.pop("model")
    assert file == builtin


def test_a_published_checkpoint_does_not(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "published.ckpt").touch()
    said = refused(capsys, str(tmp_path / "published.ckpt"), "--base", str(BUILTIN), *POOL)
    assert "export it as a folder" in said


def test_of_a_hub_model_only_small_files_are_fetched(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []

    def download(repo_id: str, *, allow_patterns: list[str], **kwargs: object) -> str:
        fetched.extend(allow_patterns)
        return str(BUILTIN)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert command(capsys, "owner/name", *POOL)["model"] == "name"
    assert fetched
    assert not any("*.safetensors" in pattern for pattern in fetched)


def test_it_runs_without_torch() -> None:
    code = "import sys; from hamburger.server.cli import main; sys.exit(main(sys.argv[1:]) or 'torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code, "plan", "--kv-cache-memory", "1GiB"], check=True, capture_output=True)


def test_numbers_can_stand_for_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = ["--layers", "32", "--kv-heads", "8", "--head-dim", "128", "--parameters", "8030261248"]
    options = ["--memory", "24GB", "--tokens-per-kv", "1.5", "--max-model-len", "8192"]
    found, preset = (command(capsys, *words, *options) for words in (numbers, ["llama-3.1-8b", "--graft", "published"]))
    assert found["parameters"] == shape_of("m", ModelConfig(trunk=PRESETS["llama-3.1-8b"]), "bfloat16").parameters
    assert found["slot_bytes"] == preset["slot_bytes"]
    assert found["pool_slots"] > preset["pool_slots"]  # the graft takes its memory


def test_more_tokens_per_kv_serve_more_requests_from_the_same_pool() -> None:
    shape = shape_of("m", GRAFTED, "float32")
    one, two = (plan(shape, kv_cache_memory=2**20, tokens_per_kv=g) for g in (1.0, 2.0))
    assert one.concurrent_requests == one.concurrent_requests_plain == two.concurrent_requests_plain
    # Blocks of 32 slots: 160 slots take 5, 100 + 30 take 5 as well; 100 + 15 take 4.
    assert two.concurrent_requests == one.concurrent_requests
    assert plan(shape, kv_cache_memory=2**20, tokens_per_kv=4.0).concurrent_requests == two.pool_blocks // 4


def test_settling_serves_more_answers_from_the_same_pool(capsys: pytest.CaptureFixture[str]) -> None:
    request = ["--prompt-tokens", "64", "--output-tokens", "2048", "--bandwidth", "1GB"]
    whole = command(capsys, "builtin", *POOL, *request)
    found = command(capsys, "builtin", *POOL, *request, "--settle", "true")
    assert 2.6 < found["tokens_per_kv"] < 2.8  # what suits the model
    assert found["slots_per_request"] < 0.6 * whole["slots_per_request"]
    assert found["concurrent_requests"] > 1.7 * whole["concurrent_requests"]
    assert found["speed"]["one_stream"] > whole["speed"]["one_stream"]
    kept = command(capsys, "builtin", *POOL, *request, "--settle", "true", "--settle-window", "4096")
    assert kept["slots_per_request"] == whole["slots_per_request"]
    flat = command(capsys, "builtin", *POOL, *request, "--settle", "true", "--settle-limit", "512")
    assert flat["slots_per_request"] <= 64 + 512 + 16
    message = refused(capsys, "builtin", *POOL, "--settle", "true", "--settle-limit", "150")
    assert "settle_limit is 150, but a window of 64 with a settle_keep of 0.33 needs 181 at least" in message
    any_model = command(
        capsys, "llama-3.2-1b", *POOL, "--max-model-len", "4096", *request, "--settle", "true"
    )  # of which nothing was fitted
    assert 2.2 < any_model["tokens_per_kv"] < 2.5
    message = refused(capsys, "builtin", "--graft", "fused", *POOL, "--settle", "true", "--tokens-per-kv", "2")
    assert "settle is on, but there are 2 tokens per KV" in message
    assert "is not a share" in refused(capsys, "builtin", *POOL, "--settle", "true", "--settle-keep", "1")


def test_what_slides_does_not_settle() -> None:
    trunk = replace(PRESETS["llama-3.2-1b"], architecture="mistral", sliding_window=64, sliding_layers=(0,))
    shape = shape_of("m", ModelConfig(trunk=trunk), "float32")
    assert plan(shape, kv_cache_memory=2**30, max_model_len=4096).concurrent_requests > 0
    settling = Settling(192, 1 / 8)
    with pytest.raises(
        ConfigError, match=r"settle is on, but layers of m see a sliding .* max_model_len to 64 at most"
    ):
        plan(shape, kv_cache_memory=2**30, max_model_len=4096, settling=settling)
    short = {"max_model_len": 64, "prompt_tokens": 32, "output_tokens": 32}  # in which the window holds all
    assert plan(shape, kv_cache_memory=2**30, **short, settling=settling).concurrent_requests > 0
