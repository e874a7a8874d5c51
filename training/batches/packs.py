"""Which examples run together, in which groups, in which step: all a function of (seed, epoch), and of nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from hamburger.model.config import TrunkConfig
from hamburger.training.batches import batches
from hamburger.training.batches.batches import TrainBatch, collate, collate_states, collate_with_base
from hamburger.training.corpus.segmentation import segment
from hamburger.training.errors import TrainingError
from hamburger.training.forward.grafts import likeliest_ids
from hamburger.training.recipe import Grouping, Recipe


class Example(batches.Example, Protocol):
    """An example with its prompt's id, and the base's entropy of each token (float32 [N], nats)."""

    @property
    def id(self) -> str: ...
    @property
    def entropy(self) -> Tensor: ...


class Source(Protocol):
    """A data set (SegmentedDataset). state_layers: the trunk layers whose states it holds."""

    @property
    def state_layers(self) -> tuple[int, ...]: ...
    def __len__(self) -> int: ...
    def example(self, index: int) -> Example: ...


class Examples:
    """Examples of several data sets, those that `wanted` lets through; one without a trained token is never wanted."""

    def __init__(self, sources: Sequence[Source], wanted: Callable[[str], bool] = lambda id: True) -> None:
        self._places: list[tuple[Source, int]] = []
        self.ids: set[str] = set()  # of their prompts
        self.longest = self.largest_group = self.highest_id = 0
        self._digest = hashlib.blake2b(digest_size=16)
        self.teacher_sizes: set[int] = set()
        self.state_layers = {source.state_layers for source in sources}
        for source in sources:
            for i in range(len(source)):
                example = source.example(i)
                # The first token has no slot before it that could foresee it.
                if wanted(example.id) and bool(example.response[1:].any()):
                    self._places.append((source, i))
                    self._note(example)

    def _note(self, example: Example) -> None:
        self.ids.add(example.id)
        self.longest = max(self.longest, len(example.token_ids))
        self.largest_group = max(self.largest_group, int(example.group_sizes.max()))
        self.highest_id = max(self.highest_id, int(example.token_ids.max()))
        if example.top_ids is not None and example.top_ids.numel():
            self.highest_id = max(self.highest_id, int(example.top_ids.max()))
        for part in (example.token_ids, example.response, example.group_sizes):
            self._digest.update(part.numpy().tobytes())
        self._digest.update(f"{example.id} {len(example.token_ids)}".encode(errors="surrogatepass"))
        self.teacher_sizes.add(0 if example.top_ids is None else example.top_ids.shape[1])

    @property
    def fingerprint(self) -> str:
        """Changes with the examples, their groups and their order."""
        return self._digest.hexdigest()

    def check(self, recipe: Recipe, trunk: TrunkConfig) -> None:
        """Raises TrainingError when a recipe, or a model with this trunk, cannot use the examples."""
        objective, max_group = recipe.objective, recipe.graft.max_group
        if self.highest_id >= trunk.vocab_size:
            raise TrainingError(
                f"the data has the token id {self.highest_id}, the model only ids below {trunk.vocab_size}: segment it "
                "with the model's own base."
            )
        if self.longest > trunk.fixed_context_tokens:
            raise TrainingError(
                f"the data has an example of {self.longest} tokens, more than the model's "
                f"{trunk.fixed_context_tokens}: segment it with a lower --max-length."
            )
        groups = recipe.groups
        reads_groups = groups.kind == "data" or (groups.kind == "jitter" and groups.data_share > 0)
        if reads_groups and self.largest_group > max_group:
            raise TrainingError(
                f"the data has groups of {self.largest_group} tokens, but graft.max_group is {max_group}: segment it "
                f"with --max-group {max_group}, or use groups.kind jitter with groups.data_share 0."
            )
        if objective.needs_teacher and 0 in self.teacher_sizes:
            raise TrainingError(
                "objective.distillation and all stop_target but boundary need the base's likeliest tokens, which the "
                "data lacks: segment it with --top-k 16."
            )
        if len(self.teacher_sizes) > 1:
            raise TrainingError(
                f"the data sets hold {sorted(self.teacher_sizes)} likeliest tokens a position: segment them with "
                "the same --top-k."
            )
        layers = recipe.graft.config(trunk).feature_layers
        # The last feature stands for the trunk's final state.
        if recipe.cached_states and (self.state_layers != {layers} or layers[-1] != trunk.num_layers - 1):
            found = ", ".join(str(list(layers)) for layers in sorted(self.state_layers))
            raise TrainingError(
                f"cached_states needs the states after the layers {list(layers)}, up to the last; the data holds those "
                f"of {found}: segment it with --states {','.join(map(str, layers))}."
            )

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Example:
        source, i = self._places[index]
        return source.example(i)

    def __iter__(self) -> Iterator[Example]:
        return (self[i] for i in range(len(self)))

    def likeliest_ids(self, size: int, vocab_size: int) -> Tensor:
        """The short list: the ids that the answers and the base's first choices hold most often."""
        return likeliest_ids(self._answer_ids(), size, vocab_size)

    def _answer_ids(self) -> Iterable[Tensor]:
        for example in self:
            yield example.token_ids[example.response]
            if example.top_ids is not None:
                yield example.top_ids[:, 0]


@dataclass(frozen=True, slots=True, eq=False)
class Pack:
    """Examples that run at once; groups: uint8 [N] for each, as Example.group_sizes."""

    examples: Sequence[Example]
    groups: Sequence[Tensor]

    @property
    def num_slots(self) -> int:
        return sum(_slots(g) for g in self.groups)

    @property
    def num_response_tokens(self) -> int:
        return sum(int(e.response.sum()) for e in self.examples)

    def collate(self, max_group: int, *, cached_states: bool = False, with_base: bool = False) -> TrainBatch:
        """The batch to run. cached_states: with the trunk's states as the data set holds them. with_base: with the same
        text in slots of one token."""
        if cached_states:
            return collate_states(self.examples, max_group)
        if with_base:
            return collate_with_base(self.examples, max_group, self.groups)
        return collate(self.examples, max_group, self.groups)


@dataclass(frozen=True, slots=True, eq=False)
class Packer:
    """Packs examples, in order, into packs of at most slots_per_pack slots; a longer example is a pack of its own.

    cached_states: only the slots that give an answer's token run, so only those count.
    """

    examples: Examples
    max_group: int
    slots_per_pack: int
    seed: int
    cached_states: bool = False

    def epoch(self, grouping: Grouping, epoch: int) -> list[Pack]:
        """The packs of an epoch, over shuffled examples."""
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.examples))
        return list(self._packs(grouping, epoch, order.tolist()))

    def in_order(self, grouping: Grouping) -> list[Pack]:
        """The packs of all examples as they come."""
        return list(self._packs(grouping, 0, range(len(self.examples))))

    def _packs(self, grouping: Grouping, epoch: int, order: Iterable[int]) -> Iterator[Pack]:
        draw = np.random.default_rng((self.seed, epoch, 1))
        single = draw.random() < grouping.single_share
        examples: list[Example] = []
        groups: list[Tensor] = []
        filled = 0
        for index in order:
            example = self.examples[index]
            sizes = self._groups(example, grouping, epoch, index)
            chosen = torch.ones_like(sizes) if single else sizes
            if examples and filled + self._size(example, chosen) > self.slots_per_pack:
                yield Pack(examples, groups)
                examples, groups, filled = [], [], 0
                single = draw.random() < grouping.single_share
                chosen = torch.ones_like(sizes) if single else sizes
            examples.append(example)
            groups.append(chosen)
            filled += self._size(example, chosen)
        if examples:
            yield Pack(examples, groups)

    def _size(self, example: Example, groups: Tensor) -> int:
        return int(example.response.sum()) if self.cached_states else _slots(groups)

    def _groups(self, example: Example, grouping: Grouping, epoch: int, index: int) -> Tensor:
        if grouping.kind == "data":
            return example.group_sizes
        if grouping.kind == "single":
            return torch.ones_like(example.group_sizes)
        draw = np.random.default_rng((self.seed, epoch, index, 2))
        if grouping.data_share and draw.random() < grouping.data_share:
            return example.group_sizes
        return jittered(example, grouping, self.max_group, draw)


def jittered(example: Example, grouping: Grouping, max_group: int, draw: np.random.Generator) -> Tensor:
    """Group sizes (uint8 [N]) of an answer that is segmented at drawn thresholds, some groups then cut in two."""
    ratio, floor = draw.uniform(*grouping.ratio), draw.uniform(*grouping.floor)
    response, entropy = example.response.numpy(), example.entropy.numpy()
    sizes = np.ones(len(response), dtype=np.uint8)
    edges = np.flatnonzero(np.diff(response, prepend=False, append=False))
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        sizes[start:end] = 0
        at = int(start)
        for size in segment(entropy[start:end].tolist(), "decreasing_v2", max_group, ratio, floor):
            cut = int(draw.integers(1, size)) if size > 1 and draw.random() < grouping.split else 0
            for part in (cut, size - cut) if cut else (size,):
                sizes[at] = part
                at += part
    return torch.from_numpy(sizes)


class PackStream:
    """The packs of a run, step after step and epoch after epoch. Steps are asked for in ascending order.

    packs_per_epoch: of the first epoch.
    """

    def __init__(self, packer: Packer, grouping: Grouping, packs_per_step: int) -> None:
        self._packer, self._grouping, self._packs_per_step = packer, grouping, packs_per_step
        self._epoch, self._before = 0, 0
        self._packs = packer.epoch(grouping, 0)
        self.packs_per_epoch = len(self._packs)

    def steps(self, epochs: float) -> int:
        """Steps that so many epochs take, all taken to be as long as the first."""
        return max(1, round(epochs * self.packs_per_epoch / self._packs_per_step))

    def packs(self, step: int) -> list[Pack]:
        """The packs that step `step` (from 0) averages."""
        return [self._pack(step * self._packs_per_step + i) for i in range(self._packs_per_step)]

    def _pack(self, position: int) -> Pack:
        while position >= self._before + len(self._packs):
            self._before += len(self._packs)
            self._epoch += 1
            self._packs = self._packer.epoch(self._grouping, self._epoch)
        return self._packs[position - self._before]


def _slots(groups: Tensor) -> int:
    return int((groups > 0).sum())
