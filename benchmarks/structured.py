"""Structured output on a real model: how many answers end, and whether each that does is what its schema allows.

    python benchmarks/structured.py --out docs/results/structured.json

100 random schemas (random_schemas.py) at several confidences of composed groups, greedy, in the offline engine. What a
grammar costs once is paid before anything is timed. Exits 1 if an answer that ended does not validate, or fewer than
95 % end within 400 tokens. Needs the dev extra (jsonschema).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema

from hamburger.engine import LLM, SamplingParams
from hamburger.engine.generation_result import GenerationResult
from hamburger.engine.grammar.writing import json_grammar
from tasks.random_schemas import random_schema

MAX_TOKENS = 400
MIN_ENDED = 0.95


def answered(
    llm: LLM, schemas: list[dict[str, Any]], confidence: float, max_tokens: int = MAX_TOKENS
) -> list[GenerationResult]:
    """An example of each schema."""
    chats = [
        [
            {
                "role": "user",
                "content": f"Write an example of JSON for this schema:\n{json.dumps(schema, ensure_ascii=False)}",
            }
        ]
        for schema in schemas
    ]
    params = [
        SamplingParams(
            temperature=0, max_tokens=max_tokens, confidence=confidence, seed=0, grammar=json_grammar(schema)
        )
        for schema in schemas
    ]
    return llm.chat(chats, params)


def measure(llm: LLM, schemas: list[dict[str, Any]], confidence: float) -> dict[str, Any]:
    start = time.monotonic()
    results = answered(llm, schemas, confidence)
    seconds = time.monotonic() - start
    ends = Counter(result.finish_reason for result in results)
    wrong = []
    for schema, result in zip(schemas, results, strict=True):
        if result.finish_reason == "stop":
            try:
                jsonschema.validate(json.loads(result.text), schema)
            except (ValueError, jsonschema.ValidationError) as error:
                wrong.append({"schema": schema, "text": result.text, "error": str(error)})
    tokens = sum(len(result.token_ids) for result in results)
    slots = sum(result.kv_slots for result in results)
    return {
        "confidence": confidence,
        "ended": ends["stop"],
        "cut": ends["length"],
        "wrong": wrong,
        "tokens": tokens,
        "tokens_per_kv": round(tokens / slots, 3),
        "tokens_per_second": round(tokens / seconds, 1),
        "longest": [r.text[-80:] for r in results if r.finish_reason == "length"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="folder, hub id or file (default: the embedded model)")
    parser.add_argument("--groups", choices=("composed", "verified"), default="composed")
    parser.add_argument("--confidences", default="0.3,0.8,1.0")
    parser.add_argument("--schemas", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write all figures here")
    args = parser.parse_args()
    draw = random.Random(args.seed)
    schemas = [random_schema(draw) for _ in range(args.schemas)]
    llm = LLM(args.model, max_model_len=2048, kv_cache_memory=2 << 30, max_num_seqs=32, groups=args.groups)
    answered(llm, schemas, 1.0, max_tokens=1)
    rows = [measure(llm, schemas, float(confidence)) for confidence in args.confidences.split(",")]
    for row in rows:
        print(
            {name: value for name, value in row.items() if name not in ("wrong", "longest")}, len(row["wrong"]), "wrong"
        )
    if args.out:
        args.out.write_text(json.dumps({"schemas": len(schemas), "seed": args.seed, "rows": rows}, indent=1))
    is_good = all(not row["wrong"] and row["ended"] >= MIN_ENDED * len(schemas) for row in rows)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
