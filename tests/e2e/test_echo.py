"""Prompt log-probabilities on a real server, with the openai client, beside transformers on the same weights."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import AsyncOpenAI

from hamburger.model.checkpoints.load import load_checkpoint
from hamburger.model.checkpoints.sources import resolve_source
from hamburger.model.config import ModelConfig
from peer import hugging_face
from real_server import RealServer
from texts import random_text


@pytest.fixture(scope="module")
def peer(grafted_folder: Path) -> Any:
    """transformers with the trunk of the grafted server."""
    checkpoint = load_checkpoint(resolve_source(str(grafted_folder)), torch.float32)
    of_trunk = {n: t for n, t in checkpoint.tensors.items() if n.startswith(("model.", "lm_head."))}
    return hugging_face(ModelConfig(trunk=checkpoint.config.trunk), of_trunk)


def prompt_of(length: int, seed: int) -> list[int]:
    ids: list[int] = torch.randint(0, 49152, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


def expected(peer: Any, ids: list[int]) -> tuple[list[float], list[bool]]:
    """Each token's log-probability but the first's, and whether it is the likeliest one."""
    with torch.inference_mode():
        rows = peer(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    targets = torch.tensor(ids[1:])
    return rows.gather(1, targets[:, None])[:, 0].tolist(), (rows.argmax(-1) == targets).tolist()


def check(peer: Any, ids: list[int], logprobs: Any) -> None:
    assert logprobs.token_logprobs[0] is None
    assert logprobs.top_logprobs[0] is None
    values, likeliest = expected(peer, ids)
    assert logprobs.token_logprobs[1 : len(ids)] == pytest.approx(values, abs=1e-3)
    found = zip(logprobs.token_logprobs[1:], logprobs.top_logprobs[1:], logprobs.tokens[1:], strict=True)
    greedy = []
    for logprob, top, token in found:
        assert top[token] == logprob
        greedy.append(logprob == max(top.values()))
    assert greedy[: len(likeliest)] == likeliest


def test_lm_eval_s_request_through_the_openai_client(grafted: RealServer, peer: Any) -> None:
    with torch.inference_mode():  # a prompt that ends with what the model likes best
        start = prompt_of(9, seed=7)
        likeliest = int(peer(torch.tensor([start])).logits[0, -1].argmax())
    prompts = [prompt_of(500, seed=1), prompt_of(1, seed=2), [*start, likeliest], prompt_of(40, seed=3)]
    answer = grafted.client.completions.create(
        model="burger", prompt=prompts, temperature=0, max_tokens=1, logprobs=1, seed=1234, echo=True
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for choice, ids in zip(answer.choices, prompts, strict=True):
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        assert len(choice.logprobs.token_logprobs) == len(ids) + 1
        check(peer, ids, choice.logprobs)
        assert choice.logprobs.text_offset == sorted(choice.logprobs.text_offset or [])
    tops = answer.choices[2].logprobs
    assert tops is not None
    assert tops.token_logprobs is not None
    assert tops.top_logprobs is not None
    assert tops.token_logprobs[9] == max(tops.top_logprobs[9].values())


async def test_32_at_once_whole_and_streamed(grafted: RealServer, peer: Any) -> None:
    prompts = [prompt_of(1 + 9 * i, seed=i) for i in range(32)]
    async with AsyncOpenAI(base_url=f"{grafted.url}/v1", api_key="unused", max_retries=0) as api:

        async def ask(i: int) -> Any:
            fields: dict[str, Any] = {"model": "burger@0.0", "prompt": prompts[i], "temperature": 0, "echo": True}
            fields |= {"logprobs": 1 + i % 4, "max_tokens": i % 3 * 4}
            if i % 2:
                return (await api.completions.create(**fields)).choices[0].logprobs
            stream = await api.completions.create(**fields, stream=True)
            joined: Any = None
            async for chunk in stream:
                if (part := chunk.choices[0].logprobs) is None:  # why it ended
                    continue
                for name in ("tokens", "token_logprobs", "top_logprobs") if joined else ():
                    getattr(joined, name).extend(getattr(part, name))
                joined = joined or part
            return joined

        answers = await asyncio.gather(*map(ask, range(32)))
    for i, (ids, logprobs) in enumerate(zip(prompts, answers, strict=True)):
        check(peer, ids, logprobs)
        assert len(ids) <= len(logprobs.tokens) <= len(ids) + i % 3 * 4
    grafted.wait_idle()
    assert grafted.metric("hamburger_kv_cache_usage_perc") == 0


def test_the_echoed_text_is_the_prompt(embedded: RealServer) -> None:
    prompt = "The sky is “blue” – isn't it? 漢字 <|im_start|> \n"
    fields = {"model": "smollm2-135m-hamburger", "prompt": prompt, "temperature": 0, "max_tokens": 4, "echo": True}
    whole = embedded.post("/v1/completions", {**fields, "logprobs": 2}).json()["choices"][0]
    answer = embedded.post("/v1/completions", {**fields, "echo": False}).json()["choices"][0]
    assert whole["text"] == prompt + answer["text"]
    told = embedded.post("/tokenize", {"prompt": prompt, "return_token_strs": True}).json()
    logprobs = whole["logprobs"]
    assert len(logprobs["tokens"]) == told["count"] + 4
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert token.startswith("bytes:") or whole["text"].startswith(token, offset)
    nothing = embedded.post("/v1/completions", {**fields, "max_tokens": 0, "logprobs": 0}).json()
    assert nothing["choices"][0]["text"] == prompt
    assert nothing["usage"]["completion_tokens"] == 0
    got = nothing["choices"][0]["logprobs"]["token_logprobs"]
    assert got[0] is None
    assert got[1:] == pytest.approx(logprobs["token_logprobs"][1 : told["count"]], abs=0.2)  # bfloat16


@pytest.mark.slow
def test_50_texts_are_scored_as_transformers_does(grafted: RealServer, peer: Any) -> None:
    draw = random.Random(1)
    texts = [random_text(draw) for _ in range(50)]
    for start in range(0, 50, 10):
        asked = [grafted.post("/tokenize", {"prompt": t}) for t in texts[start : start + 10]]
        ids: list[list[int]] = [response.json()["tokens"] for response in asked]
        answer = grafted.client.completions.create(model="burger", prompt=ids, max_tokens=1, echo=True, logprobs=1)
        for choice, prompt in zip(answer.choices, ids, strict=True):
            assert choice.logprobs is not None
            values, _ = expected(peer, prompt)
            assert choice.logprobs.token_logprobs is not None
            assert choice.logprobs.token_logprobs[1 : len(prompt)] == pytest.approx(values, abs=1e-3)
