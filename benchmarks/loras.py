"""What LoRA adapters cost a decoding step: the base alone, one adapter for all streams, one for each.

    python benchmarks/loras.py --streams 1,4,16 --rank 16

The adapters have random weights on all linears; drafts are off, so every step has one row a stream. Each round times
all three by turns, on the same engine; told are medians and the median ratio to the base of the same round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from hamburger.clients.arguments import count

if TYPE_CHECKING:
    from hamburger.engine.core.core import EngineCore
    from hamburger.model.config import TrunkConfig

_PROMPT, _WARM, _TIMED = 64, 4, 24  # tokens, steps, steps


def write_adapter(folder: Path, trunk: TrunkConfig, rank: int, seed: int) -> Path:
    """Random weights on all linears, as PEFT writes them."""
    import torch
    from safetensors.torch import save_file

    from hamburger.model.tensor_shapes import layer_shapes

    folder.mkdir()
    draw, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(trunk.num_layers):
        for name, shape in layer_shapes(trunk).items():
            if name.endswith("_proj.weight"):
                start = f"base_model.model.model.layers.{layer}.{name.removesuffix('.weight')}.lora_"
                tensors[f"{start}A.weight"] = torch.randn(rank, shape[1], generator=draw) * 0.02
                tensors[f"{start}B.weight"] = torch.randn(shape[0], rank, generator=draw) * 0.02
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def step_ms(core: EngineCore, loras: list[int]) -> float:
    """Median milliseconds of a decoding step of one stream for each entry, which is its adapter; 0: none."""
    from hamburger.engine.types.messages import SubmitRequest
    from hamburger.engine.types.sampling_params import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=_WARM + _TIMED, ignore_eos=True, seed=0, confidence=1.0)
    for i, lora in enumerate(loras):
        prompt = [(97 * i + 31 * j) % 20_000 + 100 for j in range(_PROMPT)]
        core.add(SubmitRequest(str(i), prompt, params, time.monotonic(), lora=lora))
    seconds = []
    while core.has_work:
        start = time.perf_counter()
        stats = core.step().stats
        if stats is not None and not stats.prompt_slots and stats.decoded_sequences == len(loras):
            seconds.append(time.perf_counter() - start)
    return 1000 * statistics.median(seconds[_WARM:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="as after `hamburger serve`; left out, the embedded default")
    parser.add_argument("--streams", default="1,4,16")
    parser.add_argument("--rank", type=count, default=16)
    parser.add_argument("--rounds", type=count, default=5)
    args = parser.parse_args()
    numbers = [count(part) for part in args.streams.split(",")]

    import torch

    from hamburger.engine.build import build_core
    from hamburger.engine.types.config import EngineArgs
    from hamburger.engine.types.messages import LoadLora
    from hamburger.model.checkpoints.load import load_checkpoint
    from hamburger.model.checkpoints.sources import resolve_source
    from hamburger.model.device.devices import choose_dtype

    most = max(numbers)
    engine = EngineArgs(
        model=args.model, max_model_len=512, kv_cache_memory=1 << 29, max_num_seqs=most, max_loras=most,
        max_lora_rank=args.rank, groups="verified", prefix_cache=False,
    )  # fmt: skip
    trunk = load_checkpoint(resolve_source(args.model), choose_dtype("auto", torch.device("cpu"))).config.trunk
    core, info = build_core(engine)
    with tempfile.TemporaryDirectory() as folder:
        loading = []
        for number in range(1, most + 1):
            path = write_adapter(Path(folder) / str(number), trunk, args.rank, number)
            start = time.perf_counter()
            if (error := core.load_lora(LoadLora(number, str(path)))) is not None:
                raise SystemExit(error)
            loading.append(1000 * (time.perf_counter() - start))
    print(f"{info.model}, {info.quantization}, {torch.get_num_threads()} threads, adapters of rank {args.rank}")
    print(f"loading one: {statistics.median(loading):.0f} ms")
    print("| streams | base, ms | one adapter, ms | one each, ms | one adapter / base | one each / base |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for number in numbers:
        kinds = {"base": [0] * number, "one": [1] * number, "each": list(range(1, number + 1))}
        rounds = [{name: step_ms(core, loras) for name, loras in kinds.items()} for _ in range(args.rounds)]
        base, one, each = (statistics.median(of[name] for of in rounds) for name in kinds)
        ratios = [statistics.median(of[name] / of["base"] for of in rounds) for name in ("one", "each")]
        print(f"| {number} | {base:.2f} | {one:.2f} | {each:.2f} | {ratios[0]:.2f} | {ratios[1]:.2f} |")


if __name__ == "__main__":
    main()
