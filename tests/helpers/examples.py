"""Training examples for tests."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class MadeExample:
    token_ids: Tensor
    response: Tensor
    group_sizes: Tensor
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None
    states: Tensor | None = None


def example(turns: list[tuple[list[int], list[list[int]]]], teacher_k: int = 0, vocab: int = 96) -> MadeExample:
    """From turns: (prompt token ids, the answer's groups). With teacher_k, a teacher drawn from the tokens."""
    ids: list[int] = []
    response: list[bool] = []
    sizes: list[int] = []
    for prompt, groups in turns:
        ids += prompt
        response += [False] * len(prompt)
        sizes += [1] * len(prompt)
        for group in groups:
            ids += group
            response += [True] * len(group)
            sizes += [len(group)] + [0] * (len(group) - 1)
    top_ids = top_logprobs = None
    if teacher_k:
        draw = torch.Generator().manual_seed(sum(ids))
        rows = sum(response)
        scores = torch.randn(rows, vocab, generator=draw).log_softmax(-1)
        top = scores.topk(teacher_k)
        top_ids, top_logprobs = top.indices.int(), top.values.half()
    return MadeExample(
        torch.tensor(ids, dtype=torch.int32),
        torch.tensor(response),
        torch.tensor(sizes, dtype=torch.uint8),
        top_ids,
        top_logprobs,
    )


def random_example(seed: int, teacher_k: int = 0, max_group: int = 4, turns: int = 2) -> MadeExample:
    draw = random.Random(seed)

    def ids(n: int) -> list[int]:
        return [draw.randrange(2, 96) for _ in range(n)]

    return example(
        [
            (ids(draw.randint(1, 6)), [ids(draw.randint(1, max_group)) for _ in range(draw.randint(1, 6))])
            for _ in range(draw.randint(1, turns))
        ],
        teacher_k,
    )
