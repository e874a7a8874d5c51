"""Tokens per second of the engine beside transformers' `generate`: same weights, dtype and prompts, alternately.

    python benchmarks/decode.py --streams 1,16 --repeats 3

Each repeat times both, one after the other, so that a machine whose speed drifts still gives a fair ratio. Times are of
whole answers, prefill included. Needs the dev extra (transformers).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hamburger.engine import LLM, SamplingParams
from hamburger.model.checkpoint import load_checkpoint
from hamburger.model.hf_config import trunk_config_json
from hamburger.model.sources import resolve_source


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin", help="a plain base: folder, hub id or file (default: builtin)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--streams", default="1,16", help="batch sizes, comma separated")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write all figures here")
    args = parser.parse_args()
    length = args.prompt_tokens + args.output_tokens
    llm = LLM(args.model, dtype=args.dtype, max_model_len=length, kv_cache_memory=2 << 30, prefix_cache=False)
    peer = transformers_model(args.model, getattr(torch, args.dtype))
    rows = []
    for streams in map(int, args.streams.split(",")):
        prompts = torch.randint(100, 40_000, (streams, args.prompt_tokens), generator=torch.Generator().manual_seed(0))
        ours, theirs = [], []
        for repeat in range(args.repeats + 1):
            pair = run_ours(llm, prompts, args.output_tokens), run_theirs(peer, prompts, args.output_tokens)
            if repeat:  # the first is the warm-up
                ours.append(pair[0])
                theirs.append(pair[1])
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        rows.append({"streams": streams, "ours": ours, "transformers": theirs, "ratios": ratios})
        print(
            f"{args.dtype}, {streams:3d} streams: ours {statistics.median(ours):7.1f} tok/s, "
            f"transformers {statistics.median(theirs):7.1f} tok/s, ratio {statistics.median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f})",
            flush=True,
        )
    if args.json:
        args.json.write_text(
            json.dumps({"torch": torch.__version__, "arguments": vars(args), "rows": rows}, default=str)
        )


def run_ours(llm: LLM, prompts: torch.Tensor, new_tokens: int) -> float:
    """Tokens per second of one batch."""
    sampling = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
    start = time.perf_counter()
    results = llm.generate(prompts.tolist(), sampling, progress=False)
    seconds = time.perf_counter() - start
    return sum(len(result.token_ids) for result in results) / seconds


def run_theirs(peer: Any, prompts: torch.Tensor, new_tokens: int) -> float:
    start = time.perf_counter()
    with torch.inference_mode():
        output = peer.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    seconds = time.perf_counter() - start
    return float(output.numel() - prompts.numel()) / seconds


def transformers_model(model: str, dtype: torch.dtype) -> Any:
    """The same trunk weights in transformers."""
    checkpoint = load_checkpoint(resolve_source(model), dtype)
    peer: Any = LlamaForCausalLM(LlamaConfig.from_dict(trunk_config_json(checkpoint.config.trunk))).to(dtype)
    peer.eval()
    result = peer.load_state_dict(checkpoint.tensors, strict=False)
    if set(result.missing_keys) - {"lm_head.weight"}:
        raise SystemExit(f"transformers misses {result.missing_keys}")
    peer.tie_weights()
    return peer


if __name__ == "__main__":
    main()
