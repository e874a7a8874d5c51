"""What number formats cost in quality: the embedded default and its base against themselves in float32.

    python benchmarks/formats.py TEXTS.jsonl.gz --tokens 600

TEXTS holds rows with prompt and response. Each token of a response is predicted by the trunk, and by one micro-step
whose trunk has not read the token before it; no groups are composed. Runs on the CPU: its own formats by its compiled
kernels, the GPU's by model/gpu/int8.py, which spells its product out.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hamburger.clients.arguments import count
from hamburger.model.checkpoints.sources import EMBEDDED_BASE, resolve_source

if TYPE_CHECKING:
    from torch import Tensor

    from hamburger.model.steps import EagerSteps

ON_CPU = {"the CPU's int8": 8, "the CPU's int4": 4}  # bits of the trunk's weights; heads and graft keep 8
# name -> dtype, what the linears of trunk and micro decoder and the micro-steps' head are, and the KV cache
FORMATS = {
    "float32": ("float32", "none", "float32"),
    "float32, KV bfloat16": ("float32", "none", "bfloat16"),
    "float32, KV int8": ("float32", "none", "int8"),
    "bfloat16": ("bfloat16", "none", "bfloat16"),
    "int8": ("bfloat16", "int8", "bfloat16"),
    **{f"{name}, KV {kv}": ("bfloat16", name, kv) for name, kv in product(ON_CPU, ("float32", "bfloat16", "int8"))},
}


def read_texts(file: Path, tokenizer: Any, tokens: int) -> Iterator[tuple[list[int], int]]:
    """(ids, how many of them are the prompt) of the first texts, until their responses have so many tokens."""
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            chat = tokenizer.apply_chat_template([{"role": "user", "content": row["prompt"]}])
            prompt, response = tokenizer.encode(chat), tokenizer.encode(row["response"])[:tokens]
            if len(response) < 3:
                continue
            yield [*prompt, *response], len(prompt)
            tokens -= len(response)
            if tokens <= 0:
                return


def load(model: str | None, dtype: str, weights: str) -> EagerSteps:
    """weights: as in FORMATS."""
    import torch

    from hamburger.model.assemble import assemble
    from hamburger.model.checkpoints.load import load_checkpoint
    from hamburger.model.cpu.library import load_kernels
    from hamburger.model.execution import Execution

    kind = getattr(torch, dtype)
    checkpoint = load_checkpoint(resolve_source(model), kind)
    formats: dict[str, Execution] = {
        "none": Execution(packed=False),
        "int8": Execution(packed=False, int8=True),
        **{name: Execution(kernels=load_kernels(), bits=bits) for name, bits in ON_CPU.items()},
    }
    return assemble(
        checkpoint.config,
        checkpoint.tensors,
        dtype=kind,
        device=torch.device("cpu"),
        max_positions=2048,
        execution=formats[weights],
    )


def predict(model: EagerSteps, kv: str, ids: list[int], prompt: int) -> dict[str, Tensor]:
    """float32 log-probabilities of each token of the response by the trunk [n, V], and by a micro-step from the third
    token on [n - 1, V'], with the probability that the group goes on after it."""
    import torch

    from hamburger.model.batch import ForwardBatch, Reads, empty_sampling
    from hamburger.model.kv_cache import PagedKVCache

    n, device = len(ids), torch.device("cpu")
    emit = torch.arange(prompt - 1, n - 1)
    batch = ForwardBatch(
        token_ids=torch.tensor(ids)[:, None],
        group_sizes=torch.ones(n, dtype=torch.int64),
        max_group_size=1,
        positions=torch.arange(n),
        write_slots=torch.arange(n),
        block_tables=torch.tensor([[0]]),
        context_slots=torch.tensor([n]),
        query_slots=[n],
        context_slots_host=[n],
        num_single=0,
        emit=emit,
        confidence=torch.ones(len(emit)),
        group_limits=torch.ones(len(emit), dtype=torch.int64),
        max_group_limit=1,
        sampling=empty_sampling(len(emit), device),
    )
    cache = PagedKVCache(model.config.trunk, 1, n, getattr(torch, kv), device)
    backend = model.backend
    with torch.inference_mode():
        hidden, features = backend.trunk(batch, cache, Reads(emit, len(emit)))
        found = {"trunk": backend.head(hidden).float().log_softmax(-1)}
        if model.config.graft is not None:
            # The trunk at one token, the token after it given: the micro-step foresees the one after that.
            micro = backend.begin_group(torch.stack(features, dim=1)[:-1])
            state, logits = backend.micro_step(torch.tensor(ids[prompt:-1]), micro)
            listed = logits if model.short_list is None else logits[:, model.short_list]
            found["micro-step"] = listed.float().log_softmax(-1)
            found["going on"] = (-backend.stop_logits(state, 1)).sigmoid()
    return found


class Sums:
    """Of one format, over texts: tokens, and what was found of them in sum."""

    def __init__(self) -> None:
        self.tokens = self.kl = self.changed = self.nats = self.moved = 0.0

    def add(self, wanted: dict[str, Tensor], found: dict[str, Tensor], key: str, ids: Tensor) -> None:
        w, f = wanted[key], found[key]
        self.tokens += len(w)
        if key == "going on":
            self.moved += (w - f).abs().sum().item()
            return
        self.kl += (w.exp() * (w - f)).nan_to_num(0.0).sum().item()
        self.changed += (w.argmax(-1) != f.argmax(-1)).sum().item()
        if key == "trunk":
            self.nats -= f.gather(1, ids[:, None]).sum().item()

    def told(self, key: str) -> str:
        n = self.tokens
        if key == "going on":
            return f"moved by {self.moved / n:.4f}"
        text = f"KL {self.kl / n:.5f} nats, arg-max changed {self.changed / n:.2%}"
        return f"{text}, negative log-likelihood {self.nats / n:.4f}" if key == "trunk" else text


def main() -> None:
    import torch

    from hamburger.engine.text.tokenizer import Tokenizer
    from hamburger.model.cpu.library import load_kernels

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--tokens", type=count, default=600)
    args = parser.parse_args()
    texts = list(read_texts(args.texts, Tokenizer.load(resolve_source(None).tokenizer_path), args.tokens))
    print(f"{len(texts)} texts, {sum(len(ids) - prompt for ids, prompt in texts)} tokens")
    has_kernels = load_kernels() is not None  # else built without a compiler, or for another processor
    formats = {name: of for name, of in FORMATS.items() if has_kernels or of[1] not in ON_CPU}
    for name, source in (("base", EMBEDDED_BASE), ("default", None)):
        models = {of[:2]: load(source, *of[:2]) for of in formats.values()}
        sums: dict[str, dict[str, Sums]] = {format_: defaultdict(Sums) for format_ in formats}
        for ids, prompt in texts:
            wanted: dict[str, Tensor] = {}
            for format_, (*which, kv) in formats.items():
                found = predict(models[which[0], which[1]], kv, ids, prompt)
                wanted = wanted or found  # of the first, float32
                for key in found:
                    sums[format_][key].add(wanted, found, key, torch.tensor(ids[prompt:]))
        for format_, of_format in sums.items():
            print(f"{name}, {format_}")
            for key, values in of_format.items():
                print(f"  {key}: {values.told(key)}", flush=True)


if __name__ == "__main__":
    main()
