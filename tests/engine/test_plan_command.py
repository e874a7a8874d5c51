"""What `hamburger plan` says of speed and costs, what it refuses, and its table."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest

from hamburger.engine.plan.known_shapes import PRESETS, with_graft
from hamburger.engine.plan.shape import shape_of
from hamburger.model.checkpoints.load import save_checkpoint
from hamburger.model.config import ModelConfig
from hamburger.model.parallel.shard import shard_tensor
from hamburger.model.tensor_shapes import shared_lora_a
from hamburger.server.cli import main
from planning import GRAFTED, PLAIN, POOL, command, plan, refused
from small_models import graft_config, grafted, random_tensors, trunk_config
from trunk_shapes import QWEN3_MOE


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
        (["builtin", *POOL, "--quantization", "int8", "--dtype", "float32"], "with inputs of 16 bits: set another"),
        (["builtin", *POOL, "--quantization", "int8", "--dtype", "float16", "--device", "cpu"], "no kernels for with"),
        (["builtin", *POOL, "--max-lora-rank", "0"], "--max-lora-rank: '0' is not a whole number from 1 up"),
        (["builtin", "--kv-cache-memory", "1MiB"], "max_model_len is 8192 tokens, whose KV takes 180 MiB"),
        (["builtin", "--kv-cache-memory", "9MiB"], "lower max_model_len to 384 or less, or raise kv_cache_memory"),
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
        (["llama-3.1-70b", "--memory", "80GB", "--tensor-parallel-size", "3"], "it must divide the model's num_key"),
        (["llama-3.1-70b", "--memory", "30GB", "--tensor-parallel-size", "4"], "GiB on each of 4 GPUs beside"),
        (["llama-3.1-8b", *POOL, "--tensor-parallel-size", "2", "--device", "cpu"], "but device is cpu"),
        (["llama-3.1-8b", *POOL, "--tensor-parallel-size", "2", "--settle", "true"], "settle is on, but tensor_par"),
        (["llama-3.1-8b", *POOL, "--tensor-parallel-size", "2", "--max-loras", "2"], "max_loras is 2, but tensor_"),
        (["llama-3.2-1b", *POOL, "--base", "x/y"], "base is set, but llama-3.2-1b is a whole model"),
        (["/nowhere", *POOL], "/nowhere is not a folder"),
    ],
)
def test_what_cannot_be_planned_is_one_line_that_says_why(
    capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert words in refused(capsys, *options)


@pytest.mark.parametrize(
    ("context", "prompt", "output"), [(None, 1024, 512), (1536, 1024, 512), (1024, 682, 342), (2, 1, 1)]
)
def test_a_request_of_which_nothing_is_said_fits_a_short_context(
    capsys: pytest.CaptureFixture[str], context: int | None, prompt: int, output: int
) -> None:
    options = [] if context is None else ["--max-model-len", str(context)]
    found = command(capsys, "builtin", *POOL, *options)
    assert (found["prompt_tokens"], found["output_tokens"]) == (prompt, output)


def test_the_length_that_it_names_fits(capsys: pytest.CaptureFixture[str]) -> None:
    pool = ["builtin", "--kv-cache-memory", "9MiB", "--prompt-tokens", "9", "--output-tokens", "9", "--max-model-len"]
    assert command(capsys, *pool, "384")["pool_slots"] == 384
    assert "lower max_model_len to 384 or less" in refused(capsys, *pool, "385")


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


@pytest.mark.parametrize("config", [PLAIN, GRAFTED, grafted(adapter_rank=32)], ids=["plain", "graft", "adapter"])
def test_each_gpu_holds_what_a_rank_does(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, config: ModelConfig
) -> None:
    tensors = random_tensors(config)
    save_checkpoint(tmp_path, config, tensors)
    options = [str(tmp_path), "--dtype", "float32", "--memory", "1GiB", "--prompt-tokens", "9", "--output-tokens", "9"]
    whole, part = (command(capsys, *options, "--tensor-parallel-size", size) for size in ("1", "2"))
    for name in chain(*shared_lora_a(config).values()) if config.adapter_rank else ():
        del tensors[name]  # is another's
    held = [sum(shard_tensor(name, each, rank, 2).nbytes for name, each in tensors.items()) for rank in (0, 1)]
    assert held == [part["weights_bytes"]] * 2
    assert part["slot_bytes"] == whole["slot_bytes"] / 2
    assert (part["parameters"], part["num_gpus"]) == (whole["parameters"], 2)
    assert part["pool_bytes"] == pytest.approx(0.9 * (2**30 - held[0]), abs=32 * part["slot_bytes"])
    pool = [str(tmp_path), *POOL]  # of all together
    assert command(capsys, *pool, "--tensor-parallel-size", "2")["pool_slots"] == command(capsys, *pool)["pool_slots"]
    assert main(["plan", *options, "--tensor-parallel-size", "2"]) == 0
    assert "on each of 2 GPUs" in capsys.readouterr().out


def test_numbers_of_a_model_are_split_too(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = ["--layers", "2", "--kv-heads", "2", "--head-dim", "8", "--parameters", "1000001", *POOL]
    found = command(capsys, *numbers, "--tensor-parallel-size", "2")
    assert (found["weights_bytes"], found["parameters"]) == (1000002, 1000001)
    assert "it must divide kv_heads, which is 2" in refused(capsys, *numbers, "--tensor-parallel-size", "3")
    assert "int8, but layers is given: it needs a model" in refused(capsys, *numbers, "--quantization", "int8")


def test_without_fewer_slots_there_is_nothing_to_compare(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-3.2-1b", "--memory", "80GB", "--bandwidth", "2TB"]) == 0
    text = capsys.readouterr().out
    assert "one token a slot" not in text
    assert " x" not in text
    assert "They count one token a pass: accepted drafts add to it." in text


@pytest.mark.parametrize("buffering", ["", "1"])
def test_who_reads_it_may_have_enough(buffering: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    words = [sys.executable, "-c", "import sys; from hamburger.server.cli import main; sys.exit(main())", "plan"]
    env = {**os.environ, "PYTHONUNBUFFERED": buffering}
    told = subprocess.run([*words, *POOL], stdout=writing, stderr=subprocess.PIPE, env=env, check=False)
    os.close(writing)
    assert (told.returncode, told.stderr) == (141, b"")  # no success: a file that it was to write may be missing


def test_verified_groups_take_a_slot_a_token() -> None:
    composed = replace(graft_config(), expected_tokens_per_kv=2.5)
    for graft, expected in ((composed, 2.5), (replace(composed, groups="verified"), 1.0)):
        config = ModelConfig(trunk=trunk_config(), graft=graft)
        assert shape_of("small", config, "float32").tokens_per_kv == expected
