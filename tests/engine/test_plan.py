"""`hamburger plan` foretells what the engine does: its weights, its pool, the slots of a request, who runs at once."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from hamburger.engine.build import build_core
from hamburger.engine.drafting.costs import MeasuredCosts
from hamburger.engine.plan.known_shapes import PRESETS, with_graft
from hamburger.engine.plan.plan import Load, Machine, Plan, Shape, make_plan, shape_of
from hamburger.engine.types.config import EngineArgs, KVCacheDtype, Quantization
from hamburger.engine.types.messages import SubmitRequest
from hamburger.engine.types.settling import Settling
from hamburger.model.checkpoints.load import save_checkpoint
from hamburger.model.checkpoints.sources import BUILTIN, embedded_gguf
from hamburger.model.config import ConfigError, ModelConfig
from hamburger.server.cli import main
from slow_cases import slow
from small_models import core_of, graft_config, params, plain_model, random_model, random_tensors, trunk_config
from trunk_shapes import QWEN3_MOE
from verified import free_rows

PLAIN = ModelConfig(trunk=trunk_config())
GRAFTED = ModelConfig(trunk=trunk_config(), graft=graft_config())
POOL = ["--kv-cache-memory", "1GiB"]


def command(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    """What `hamburger plan --json` prints."""
    assert main(["plan", *options, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refused(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The one line that it prints instead."""
    try:
        code: object = main(["plan", *options])
    except SystemExit as stop:  # a wrong option
        code = stop.code
    assert code == 2
    out, error = capsys.readouterr()
    assert not out
    assert error.count("\n") == 1
    return error


def plan(shape: Shape, **fields: Any) -> Plan:
    machine = {name: fields.pop(name) for name in list(fields) if name in Machine.__dataclass_fields__}
    return make_plan(shape, Machine(**machine), Load(**{"prompt_tokens": 100, "output_tokens": 60, **fields}))


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
    with pytest.raises(ConfigError, match="settle is on, but layers of m see a sliding window"):
        plan(shape, kv_cache_memory=2**30, max_model_len=4096, settling=Settling(192, 1 / 8))


def test_bounds_of_speed_follow_from_bytes() -> None:
    shape = shape_of("m", GRAFTED, "float32")
    assert shape.reads is not None
    found = plan(shape, kv_cache_memory=2**20, tokens_per_kv=2.0, bandwidth=1e9).speed
    assert found is not None
    head = 96 * 32
    assert shape.reads.head == 4 * head
    # Two tokens a slot are reached with a third of the groups full (4 tokens) and the others alone.
    weights = shape.reads.trunk + 4 * head + shape.reads.merge / 3 + shape.reads.micro
    step = weights + shape.slot_bytes * (100 + 60 / 2 / 2)
    assert found.one_stream == pytest.approx(2 * 1e9 / step)
    plain = shape.reads.plain + 4 * head + shape.slot_bytes * (100 + 60 / 2)
    assert found.one_stream_plain == pytest.approx(1e9 / plain)
    assert found.all_requests > found.one_stream
    assert plan(shape, kv_cache_memory=2**20).speed is None


def test_a_stream_reads_its_experts_alone() -> None:
    """Of 6 experts of a layer 2; two streams choose by lot, so that 4/9 are left unread."""
    shape = shape_of("m", ModelConfig(trunk=trunk_config(**QWEN3_MOE)), "float32")
    assert shape.reads is not None
    each = 4 * 3 * 32 * 32  # bytes of an expert, of which three layers have six
    assert shape.reads.experts == 3 * 6 * each
    assert shape.weights_bytes == 4 * shape.parameters
    found = plan(shape, kv_cache_memory=2**20, bandwidth=1e9, max_num_seqs=2).speed
    assert found is not None
    whole = shape.reads.trunk + shape.reads.head
    context = shape.slot_bytes * (100 + 60 / 2)
    assert found.one_stream == pytest.approx(1e9 / (whole - 3 * 4 * each + context))
    unread = 3 * 6 * each * (2 / 3) ** 2
    assert found.all_requests == pytest.approx(2 * 1e9 / (whole - unread + 2 * context))


def test_an_adapter_of_merged_slots_is_read_with_the_merger() -> None:
    plain, adapted = (shape_of("m", replace(GRAFTED, adapter_rank=rank), "float32").reads for rank in (0, 32))
    assert plain is not None
    assert adapted is not None
    assert adapted.merge > plain.merge
    assert replace(adapted, merge=plain.merge) == plain


def test_the_costs_are_those_of_the_published_model() -> None:
    reads = shape_of("m", with_graft(PRESETS["llama-3.2-1b"], "published"), "bfloat16").reads
    assert reads is not None
    assert reads.plain / 2e6 == pytest.approx(973, abs=1)
    assert reads.head / 2e6 == pytest.approx(263, abs=1)
    assert reads.micro / (reads.plain + reads.head) == pytest.approx(0.41, abs=0.01)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["builtin"], "memory is missing: give the machine's with --memory, or the KV pool's with --kv-cache-memory"),
        (["builtin", "--memory", "much"], "--memory: 'much' is no size"),
        (["builtin", "--memory", "0"], "--memory: '0' is no size"),
        (["builtin", "--memory", "100MB"], "memory is 0.09 GiB, which does not hold smollm2-135m-instruct's weights"),
        (["builtin", "--memory", "1GB", "--reserved", "900MB"], "beside 0.84 GiB that are reserved"),
        (["builtin", "--memory", "1GiB", "--kv-cache-memory", "2GiB"], "and a KV pool of 2.00 GiB"),
        (["builtin", "--memory", "1GB", "--max-loras", "20"], "GiB and LoRA adapters of 1.08 GiB beside"),
        (["builtin", *POOL, "--max-lora-rank", "0"], "--max-lora-rank: '0' is not a whole number from 1 up"),
        (["builtin", "--kv-cache-memory", "1MiB"], "max_model_len is 8192 tokens, whose KV takes 180 MiB"),
        (["builtin", *POOL, "--block-size", "10000000"], "block_size is 10000000 slots, whose KV takes"),
        (["builtin", *POOL, "--settle", "maybe"], "--settle: 'maybe' is neither true nor false"),
        (["builtin", *POOL, "--max-model-len", "9000"], "max_model_len is 9000, but the model was made for 8192"),
        (["builtin", *POOL, "--prompt-tokens", "8000"], "are 8512 together, but max_model_len is 8192"),
        (["builtin", *POOL, "--prompt-tokens", "0"], "--prompt-tokens: '0' is not a whole number from 1 up"),
        (["builtin", *POOL, "--tokens-per-kv", "2"], "it can be at most 1; plan it with --graft"),
        ([*POOL, "--tokens-per-kv", "4.5"], "is a HAMburger: it can be at most 4; lower it"),
        ([*POOL, "--tokens-per-kv", "0.5"], "--tokens-per-kv: '0.5' is not a number from 1 to 16"),
        ([*POOL, "--graft", "fused"], "is a HAMburger already"),
        ([*POOL, "--layers", "2", "--parameters", "9"], "layers is given without kv_heads, head_dim"),
        (["builtin", *POOL, "--layers", "2"], "model is given, and layers too"),
        (["llama-3.2-1b", *POOL, "--base", "x/y"], "base is set, but llama-3.2-1b is a whole model"),
        (["/nowhere", *POOL], "/nowhere is not a folder"),
    ],
)
def test_what_cannot_be_planned_is_one_line_that_says_why(
    capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert words in refused(capsys, *options)


def test_parameters_alone_say_no_speed(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = ["--layers", "2", "--kv-heads", "1", "--head-dim", "8", "--parameters", "9", *POOL]
    assert "bandwidth says a speed only with" in refused(capsys, *numbers, "--bandwidth", "1GB")
    assert "max_loras needs the shapes" in refused(capsys, *numbers, "--max-loras", "1")


def test_the_table_says_what_to_set(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["llama-3.2-1b", "--graft", "published", "--memory", "80GB", "--tokens-per-kv", "2", "--bandwidth", "2TB"]
    assert main(["plan", *options]) == 0
    text = capsys.readouterr().out
    found = command(capsys, *options)
    assert f"Serve with --max-num-seqs {found['concurrent_requests']}" in text
    assert "2 tokens per KV" in text
    assert "a bound, no measurement" in text.lower()
    assert main(["plan", *options, "--max-num-seqs", "8"]) == 0
    assert "max_num_seqs is the limit here, 8 answers at once" in capsys.readouterr().out


def test_verified_groups_take_a_slot_a_token() -> None:
    composed = replace(graft_config(), expected_tokens_per_kv=2.5)
    for graft, expected in ((composed, 2.5), (replace(composed, groups="verified"), 1.0)):
        config = ModelConfig(trunk=trunk_config(), graft=graft)
        assert shape_of("small", config, "float32").tokens_per_kv == expected
