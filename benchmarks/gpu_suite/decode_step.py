"""Milliseconds of one decoding macro-step: without graphs, and with those of DecodeGraphs, over random weights.

    python benchmarks/start.py gpu_suite.decode_step --model llama-3.2-1b --rows 1,8,64 --context 1024

Each number of rows is measured at each confidence: 0, at which groups are full, and 1, at which they have one token and
no micro-step runs. The tokens per group are printed beside it. Both forms of one line are timed alternately. On a CPU
graphs are replayed eagerly: that proves this script, and no speed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from hamburger.engine.device.memory import pool_bytes
from hamburger.engine.plan.known_shapes import PRESETS, with_graft
from hamburger.model.assemble import assemble
from hamburger.model.batch import ForwardBatch, StepOutput, empty_sampling
from hamburger.model.config import GraftConfig, ModelConfig, TrunkConfig
from hamburger.model.device.devices import make_current
from hamburger.model.execution import Execution
from hamburger.model.gpu.availability import choose_backend
from hamburger.model.graphs.capture import CudaCapture, EagerCapture
from hamburger.model.graphs.decode_graphs import DecodeGraphs
from hamburger.model.graphs.step_memory import Largest, largest_decode
from hamburger.model.kv_cache import PagedKVCache
from hamburger.model.steps import EagerSteps
from hamburger.model.tensor_shapes import tensor_shapes

BLOCK = 32
TINY = TrunkConfig(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16,
    rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=True, max_position_embeddings=8192,
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-3.2-1b", choices=[*PRESETS, "tiny"])
    parser.add_argument("--graft", default="published", choices=["published", "fused"])
    parser.add_argument("--rows", default="1,8,64", help="sequences of a step, with commas between them")
    parser.add_argument("--context", type=int, default=1024, help="slots of each")
    parser.add_argument("--confidences", default="0,1")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--device", help="cuda, cuda:N or cpu (default: the GPU, where there is one)")
    args = parser.parse_args()
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    make_current(device)
    model = random_model(args.model, args.graft, args.context, device)
    for rows in map(int, args.rows.split(",")):
        for confidence in map(float, args.confidences.split(",")):
            figures = measure(model, rows, args.context, confidence, args.repeats)
            print(json.dumps({"device": _name(device), "rows": rows, "context": args.context, **figures}), flush=True)


def random_model(name: str, graft: str, context: int, device: torch.device) -> EagerSteps:
    """bfloat16 on a GPU; the size of weights is such that activations stay near 1."""
    if name == "tiny":
        config = ModelConfig(
            trunk=TINY, graft=GraftConfig(max_group=4, merger_heads=4, micro_layers=2, feature_layers=(1, 2, 3))
        )
    else:
        config = with_graft(PRESETS[name], graft)  # type: ignore[arg-type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)
    tensors = {}
    for tensor, shape in tensor_shapes(config).items():
        if tensor == "short_list":
            tensors[tensor] = torch.arange(shape[0], device=device)
            continue
        drawn = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        tensors[tensor] = 1 + 0.1 * drawn if "norm" in tensor else drawn * shape[-1] ** -0.5
    return assemble(
        config,
        tensors,
        dtype=dtype,
        device=device,
        max_positions=context + 64,
        execution=Execution(packed=False, static_shapes=True, attention=choose_backend("auto", device)),
    )


def measure(model: EagerSteps, rows: int, context: int, confidence: float, repeats: int) -> dict[str, object]:
    """Median milliseconds of a step in both forms, and the tokens of its groups."""
    device = model.device
    columns = -(-context // BLOCK)
    num_blocks = rows * columns
    if num_blocks * BLOCK * model.config.trunk.slot_bytes(model.state_dtype.itemsize) > pool_bytes(device, None):
        raise SystemExit(f"{rows} rows of {context} slots do not fit into memory: give fewer.")
    cache = PagedKVCache(model.config.trunk, num_blocks, BLOCK, model.state_dtype, device)
    batch = decoding(model, rows, context, columns, confidence)
    graphs = DecodeGraphs(
        model,
        cache,
        CudaCapture(device) if device.type == "cuda" else EagerCapture(),
        max_rows=rows,
        max_columns=columns,
    )
    graphs.prepare(only=rows)
    steps: dict[str, Callable[[ForwardBatch, PagedKVCache], StepOutput]] = {"eager": model.step, "graphs": graphs.step}
    times: dict[str, list[float]] = {name: [] for name in steps}
    sizes = {name: step(batch, cache).group_sizes.float().mean().item() for name, step in steps.items()}
    for _ in range(repeats):
        for name, step in steps.items():
            _wait(device)
            start = time.perf_counter()
            step(batch, cache)
            _wait(device)
            times[name].append(1000 * (time.perf_counter() - start))
    return {
        "confidence": confidence,
        "tokens_per_group": round(sizes["eager"], 3),
        "milliseconds": {name: round(statistics.median(found), 4) for name, found in times.items()},
    }


def decoding(model: EagerSteps, rows: int, context: int, columns: int, confidence: float) -> ForwardBatch:
    """Full groups in, each row on its own blocks, in an order that is not that of the pool."""
    largest = Largest(
        max_slots=rows,
        max_rows=rows,
        max_model_len=context,
        context_slots=context,
        max_logprobs=0,
        block_size=BLOCK,
        kv_dtype=model.state_dtype,
    )
    device = model.device
    generator = torch.Generator().manual_seed(1)
    tables = torch.randperm(rows * columns, generator=generator).view(rows, columns).to(device)
    batch = largest_decode(model, largest)
    tokens = torch.randint(2, model.config.trunk.vocab_size, batch.token_ids.shape, generator=generator)
    last = context - 1
    return replace(
        batch,
        token_ids=tokens.to(device),
        positions=torch.full_like(batch.positions, last),
        block_tables=tables,
        write_slots=tables[:, last // BLOCK] * BLOCK + last % BLOCK,
        confidence=torch.full_like(batch.confidence, confidence),
        max_group_limit=model.config.max_group if confidence < 1 else 1,
        sampling=empty_sampling(rows, device),
    )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


if __name__ == "__main__":
    main()
