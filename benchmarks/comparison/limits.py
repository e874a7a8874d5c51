"""The physical limit: how fast this machine reads memory, and the bytes of weights that one macro-step reads.

Weights count as their files hold them: trunk and head once a step, micro decoder and its head once for each token after
a group's first, embedder and adapter once for each group of more than one token that comes in. Started as a
program (start.py) it prints the bandwidth in bytes/s, so that the driver never imports torch.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from comparison.processes import START
from hamburger.model.checkpoints.sources import ModelSource, own_files, read_json

PROBE_BYTES = 1 << 30  # far beyond any cache
PROBE_REPEATS = 7


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes that a macro-step reads: always; where a composed slot (of several tokens) comes in; for each token after
    its own group's first."""

    step: int
    composed: int = 0
    micro_step: int = 0

    def of_answer(self, groups: Sequence[int]) -> int:
        """Bytes of the macro-steps after the first, which had the prompt to read; groups: tokens of each group."""
        composed = sum(tokens > 1 for tokens in groups[:-1])  # the last group never comes in
        added = sum(tokens - 1 for tokens in groups[1:])
        return (len(groups) - 1) * self.step + composed * self.composed + added * self.micro_step


def measure_bandwidth(threads: int, timeout: float = 120) -> float:
    """Bytes/s, in a process of its own. Raises OSError or subprocess errors where it cannot be measured."""
    command = [sys.executable, str(START), "comparison.limits", "--threads", str(threads)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=True)
    return float(json.loads(result.stdout))


@dataclass(frozen=True, slots=True)
class GgufSizes:
    """What a step reads of a GGUF file. An embedding that is not the head too is left out: only its own rows are read.

    head_bytes: of the head, for all `vocabulary` tokens.
    """

    bytes: int
    parameters: int
    head_bytes: int
    vocabulary: int


def gguf_sizes(file: Path) -> GgufSizes:
    """Reads the file's header: seconds, so do it once."""
    from gguf import GGUFReader

    tensors = {tensor.name: tensor for tensor in GGUFReader(file).tensors}
    head = tensors.get("output.weight")
    if head is None:
        head = tensors["token_embd.weight"]
    else:
        tensors.pop("token_embd.weight", None)
    return GgufSizes(
        bytes=sum(int(tensor.n_bytes) for tensor in tensors.values()),
        parameters=sum(int(tensor.n_elements) for tensor in tensors.values()),
        head_bytes=int(head.n_bytes),
        vocabulary=int(head.shape[-1]),
    )


def hamburger_bytes(source: ModelSource, base: GgufSizes) -> WeightBytes:
    """A graft (and its adapter) in `source`'s folder over a GGUF base."""
    from safetensors import safe_open

    settings = read_json(source.path / "config.json")
    graft, slots = settings["graft"], settings.get("adapter", {}).get("slots", "all")
    of_composed = ("embedder.", "adapter.") if slots == "composed" else ("embedder.",)
    micro = composed = step = 0
    for file in own_files(source.path):
        with safe_open(file, framework="numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                view = tensors.get_slice(name)
                size = _DTYPE_BYTES.get(view.get_dtype(), 0)
                for length in view.get_shape():
                    size *= length
                if name.startswith("micro_decoder."):
                    micro += size
                elif name.startswith(of_composed):
                    composed += size
                else:
                    step += size
    micro += base.head_bytes * min(graft.get("short_list_size") or base.vocabulary, base.vocabulary) // base.vocabulary
    return WeightBytes(base.bytes + step, composed, micro)


# Integers are lists of ids, not weights.
_DTYPE_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1}


def _probe(threads: int) -> float:
    """The fastest of some reads of a large array, summed on all threads."""
    import torch

    torch.set_num_threads(threads)
    numbers = torch.ones(PROBE_BYTES // 4, dtype=torch.float32)
    best = 0.0
    for _ in range(PROBE_REPEATS):
        start = time.perf_counter()
        numbers.sum()
        best = max(best, PROBE_BYTES / (time.perf_counter() - start))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description="Prints how many bytes/s this machine reads from memory.")
    parser.add_argument("--threads", type=int, required=True)
    print(json.dumps(_probe(parser.parse_args().threads)))


if __name__ == "__main__":
    main()
