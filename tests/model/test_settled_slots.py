"""Settled slots on real models: logits are those of a plain pass with a mask, and nothing but the answer decides."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from exactness import Answer, answer, asking, numbers
from hamburger.engine.core.core import EngineCore
from hamburger.engine.types.messages import SubmitRequest
from hamburger.engine.types.settling import Settling
from hamburger.model.assemble import assemble
from hamburger.model.config import ModelConfig
from hamburger.model.cpu.library import load_kernels
from hamburger.model.cpu.slot_choice import CpuSlotChoice
from hamburger.model.execution import Execution
from hamburger.model.modules.hamburger import HamburgerModel
from hamburger.model.modules.rotary import RotaryEmbedding, inverse_frequencies, rotate
from hamburger.model.modules.trunk import run_layers
from hamburger.model.slot_choice import SlotChoice
from hamburger.model.steps import EagerSteps
from native_models import WIDE
from playing import play
from slow_cases import slow
from small_models import CPU, core_of, graft_config, params, plain_model, random_tensors, trunk_config
from verified import free_rows

LENGTH = 160
UNTURNED = (1,)  # a layer whose keys have no position
SETTLING = Settling(window=20, keep=1 / 4, growth=1 / 4, chunk=16, apart=8)
AT_LIMIT = replace(SETTLING, limit=60)  # one chunk has slots at a time


def config_of(*, grafted: bool) -> ModelConfig:
    trunk = trunk_config(
        vocab_size=128, eos_token_ids=(1,), max_position_embeddings=LENGTH, unturned_layers=UNTURNED, **WIDE
    )
    return ModelConfig(trunk=trunk, graft=graft_config() if grafted else None)


def steps_of(form: str, *, grafted: bool = True) -> EagerSteps:
    config = config_of(grafted=grafted)
    execution = Execution(kernels=load_kernels()) if form == "kernels" else Execution(static_shapes=False)
    if form == "kernels" and execution.kernels is None:
        pytest.skip("built without a compiler, or for another processor")
    tensors = random_tensors(config, 5)
    return assemble(config, tensors, dtype=torch.float32, device=CPU, max_positions=LENGTH, execution=execution)


def requests(number: int = 8, **fields: Any) -> list[SubmitRequest]:
    draw, found = random.Random(7), []
    for i in range(number):
        prompt = [draw.randrange(2, 128) for _ in range(draw.choice([1, 5, 30]))]
        hot = {"temperature": 0.9, "seed": i} if i % 2 else {}
        asked = params(max_tokens=100 + i, ignore_eos=True, confidence=0.0, **hot, **fields)
        found.append(SubmitRequest(str(i), prompt, asked, 0.0))
    return found


def answers(core: EngineCore, asked: list[SubmitRequest], seen: Counter[str], at_once: int = 4) -> dict[str, Answer]:
    played = play(core, asked, at_once=at_once)
    seen.update(played.seen)
    for outputs in played.outputs.values():
        seen["dropped"] += outputs[-1].dropped_slots
        seen["drafted"] += sum(output.drafts is not None for output in outputs)
    return {name: answer(outputs) for name, outputs in played.outputs.items()}


class Masked:
    """A whole text in one plain pass a chunk: what each token sees of those before it, and who stays, spelled out."""

    def __init__(
        self, model: HamburgerModel, request: SubmitRequest, text: list[int], settling: Settling, numbers: Tensor
    ) -> None:
        """numbers: [layers, kv_heads], tokens of a chunk that each head keeps."""
        prompt, trunk = request.prompt_ids, model.config.trunk
        self._model, self._start, self._ids = model, len(prompt), torch.tensor([*prompt, *text])
        length, self._freqs = len(self._ids), inverse_frequencies(trunk)
        self.dropped_at = torch.full((trunk.num_layers, trunk.num_kv_heads, length), length)
        for place, settled in settling.places(len(text)):
            self._pass()
            first = self._start + settled
            for layer, keys in enumerate(self._keys):
                for head in range(trunk.num_kv_heads):
                    apart = keys[first : first + settling.chunk, head]
                    if layer not in UNTURNED:
                        apart = torch.stack([self._apart(key, first + i) for i, key in enumerate(apart)])
                    units = apart / apart.norm(dim=1, keepdim=True)
                    mean = units.mean(0)
                    alike = units @ (mean / mean.norm())
                    unlike = (-4096 * alike).round().tolist()  # what rounding does shall not count; then the newest
                    order = sorted(range(settling.chunk), key=lambda i: (unlike[i], i))
                    gone = torch.tensor(order[: settling.chunk - int(numbers[layer, head])])
                    self.dropped_at[layer, head, first + gone] = self._start + place
        self.logprobs = self._pass().log_softmax(-1)

    def _apart(self, key: Tensor, position: int) -> Tensor:
        """A rotated key [head_dim], turned back."""
        a, b = key.chunk(2)
        turned = torch.complex(a, b) * torch.polar(torch.ones_like(a), -position * self._freqs)
        return torch.cat((turned.real, turned.imag))

    @torch.inference_mode()
    def _pass(self) -> Tensor:
        """Logits [T, V]; leaves each layer's keys."""
        model, places = self._model, torch.arange(len(self._ids))
        past = places <= places[:, None]
        self._keys: list[Tensor] = []
        angles = model.rotary.of_layers(places)

        def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._keys.append(k)
            each = q.shape[1] // k.shape[1]
            seen = past & (self.dropped_at[index][:, None] > places[:, None])
            keys, values = k.repeat_interleave(each, 1), v.repeat_interleave(each, 1)
            scores = torch.einsum("qhd,khd->hqk", q, keys) * q.shape[-1] ** -0.5
            weights = scores.masked_fill(~seen.repeat_interleave(each, 0), float("-inf")).softmax(-1)
            return torch.einsum("hqk,khd->qhd", weights, values).flatten(1)

        def layer(index: int, x: Tensor) -> Tensor:
            out: Tensor = model.trunk.layers[index](x, *angles[index], partial(attend, index))
            return out

        x = model.embed_tokens(self._ids)
        states, _ = run_layers(len(model.trunk.layers), x, layer, (), lambda x: x, model.trunk.final)
        return states @ model.head_weight.T


# Of 4 layers and 2 KV heads: two lend their places to one, a third to another; two have their own alone.
LENT = torch.tensor([[1, 0], [3, 2], [0, 0], [1, 1]])
KEPT = torch.tensor([[4, 1], [10, 7], [1, 1], [4, 4]])  # of a chunk of 16, a quarter


@pytest.mark.parametrize(
    ("block_size", "shares", "kept"), [(4, None, 4), (12, None, 4), (32, None, 4), (12, LENT, KEPT)]
)
def test_logits_are_those_of_a_pass_with_a_mask(block_size: int, shares: Tensor | None, kept: Tensor | int) -> None:
    asked = requests(6, logprobs=3)
    core = core_of(
        steps_of("torch"),
        block_size=block_size,
        num_blocks=-(-1000 // block_size),
        max_model_len=LENGTH,
        policy=free_rows(3),
        settling=SETTLING,
        shares=shares,
    )
    found = answers(core, asked, seen := Counter[str]())
    model = plain_model(config_of(grafted=True), 5)
    numbers = torch.as_tensor(kept).expand(4, 2)
    for request in asked:
        mine = found[request.request_id]
        masked = Masked(model, request, mine.token_ids, SETTLING, numbers)
        for i, (token_id, entry) in enumerate(zip(mine.token_ids, mine.logprobs, strict=True)):
            row = masked.logprobs[len(request.prompt_ids) + i - 1]
            assert entry.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
            assert [p for _, p in entry.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
    assert seen["dropped"] == sum(SETTLING.settled_slots(len(one.token_ids)) for one in found.values())
    assert seen["drafted"] > 50


@pytest.mark.parametrize(
    ("form", "logprobs", "settling", "kv_dtype", "shares"),
    [
        ("kernels", None, SETTLING, None, None),
        ("kernels", 2, SETTLING, None, LENT),
        ("kernels", None, AT_LIMIT, None, LENT),
        ("kernels", None, SETTLING, torch.int8, LENT),
        # On torch, where a product of another shape rounds otherwise, and may choose another code of 8 bits.
        ("torch", 2, AT_LIMIT, None, LENT),
        slow("torch", None, SETTLING, None, None),
        slow("torch", 2, SETTLING, None, LENT),
        slow("torch", None, AT_LIMIT, None, LENT),
    ],
)
def test_neither_batch_nor_drafts_nor_preemption_change_the_answer(
    form: str, logprobs: int | None, settling: Settling, kv_dtype: torch.dtype | None, shares: Tensor | None
) -> None:
    steps, asked, seen = steps_of(form), requests(logprobs=logprobs), Counter[str]()

    def core(**settings: Any) -> EngineCore:
        limits = {"num_blocks": 300, "max_model_len": LENGTH, **settings}
        kernels = load_kernels() if form == "kernels" else None
        choice = SlotChoice if kernels is None else partial(CpuSlotChoice, kernels)
        limits |= {"settling": settling, "choice": choice, "shares": shares, "kv_dtype": kv_dtype}
        return core_of(steps, policy=free_rows(3), **limits)

    truth = answers(core(max_num_seqs=1), asking(asked, confidence=1.0), seen)
    assert not seen["drafted"]
    tight: dict[str, Any] = {"num_blocks": 44, "max_num_seqs": 6, "max_num_batched_slots": 24, "prefix_cache": True}
    for settings in ({}, tight):
        for name, mine in answers(core(**settings), asked, seen).items():
            other = truth[name]
            assert (mine.token_ids, mine.end) == (other.token_ids, other.end)
            if form == "kernels":
                assert mine == other
            else:
                assert numbers(mine) == pytest.approx(numbers(other), abs=1e-4)
    assert seen["preemptions"] > 3
    assert seen["drafted"] > 100
    unsettled = core_of(steps, num_blocks=300, max_model_len=LENGTH, policy=free_rows(3), kv_dtype=kv_dtype)
    whole = answers(unsettled, asked, Counter())
    assert any(whole[name].token_ids != truth[name].token_ids for name in truth)  # it is another text


@pytest.mark.parametrize("form", ["kernels", "torch"])
def test_a_window_beyond_the_answer_is_the_whole_model(form: str) -> None:
    steps, asked = steps_of(form, grafted=False), requests(4, logprobs=1)
    wide = Settling(window=200, keep=1 / 4, chunk=16, apart=8)
    found = [
        answers(
            core_of(steps, num_blocks=300, max_model_len=LENGTH, policy=free_rows(0), settling=settling),
            asked,
            Counter(),
        )
        for settling in (wide, None)
    ]
    assert found[0] == found[1]


def test_a_probe_chooses_by_keys_without_their_positions_and_values_norms() -> None:
    trunk = config_of(grafted=False).trunk
    layers, heads, dim = trunk.num_layers, trunk.num_kv_heads, trunk.head_dim
    rotary = RotaryEmbedding(trunk, LENGTH, CPU, torch.float32)
    keys, values = torch.randn(2, layers, 8, heads, dim, generator=torch.Generator().manual_seed(1))
    probe = torch.randn(layers, heads, dim + 1, generator=torch.Generator().manual_seed(2))
    wanted = (keys * probe[:, None, :, :-1]).sum(-1) + values.norm(dim=-1).log() * probe[:, None, :, -1]
    for first in (0, 100):  # wherever the chunk lies
        positions = torch.arange(first, first + 8)
        turned = rotate(keys, *rotary(positions))
        turned[1] = keys[1]
        held = torch.stack((turned, values), dim=2)
        choice = SlotChoice(rotary, probe)
        torch.testing.assert_close(choice.scores(held, positions), wanted)
        numbers = torch.tensor([[3, 1]]).expand(layers, heads)
        stay = choice.stay(held, positions, numbers)
        for head, number in enumerate((3, 1)):
            best = wanted[..., head].topk(number, dim=1).indices
            assert torch.equal(stay[..., head], torch.zeros(layers, 8, dtype=torch.bool).scatter(1, best, value=True))


def test_of_equals_the_newest_stay() -> None:
    rotary = RotaryEmbedding(config_of(grafted=False).trunk, LENGTH, CPU, torch.float32)
    trunk = rotary.config
    key, other = torch.randn(2, trunk.head_dim, generator=torch.Generator().manual_seed(1))
    keys = key.repeat(trunk.num_layers, 8, trunk.num_kv_heads, 1)
    keys[:, 2] = other
    positions = torch.arange(90, 98)
    held = torch.stack((rotate(keys, *rotary(positions)), keys), dim=2)
    numbers = torch.full((trunk.num_layers, trunk.num_kv_heads), 3)
    assert SlotChoice(rotary).stay(held, positions, numbers)[0, :, 0].nonzero()[:, 0].tolist() == [2, 6, 7]


def test_a_fitted_probe_is_another_choice_and_as_exact() -> None:
    steps, trunk = steps_of("torch"), config_of(grafted=True).trunk
    # Hot, as colder texts of this model go round in circles whatever they attend to.
    asked = [replace(one, params=replace(one.params, temperature=2.0)) for one in requests(4)]
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(trunk.num_layers, trunk.num_kv_heads, trunk.head_dim + 1, generator=generator)

    def found(at_once: int, probe: Tensor | None) -> dict[str, Answer]:
        choice = partial(SlotChoice, probe=probe)
        core = core_of(
            steps, num_blocks=300, max_model_len=LENGTH, policy=free_rows(3), settling=SETTLING, choice=choice
        )
        return answers(core, asked, Counter(), at_once=at_once)

    fitted = found(4, probe)
    assert fitted == found(1, probe)
    assert fitted != found(4, None)
