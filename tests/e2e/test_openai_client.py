"""The official openai client against real servers."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from real_server import RealServer

MESSAGES: list[Any] = [{"role": "user", "content": "Name three colours."}]
EMBEDDED = "smollm2-135m-hamburger"


def test_models_lists_the_embedded_default(embedded: RealServer) -> None:
    models = list(embedded.client.models.list())
    assert models[0].id == EMBEDDED
    assert models[0].model_dump()["max_model_len"] == 512
    assert embedded.client.models.retrieve(EMBEDDED).id == EMBEDDED


def test_chat_is_sensible_and_streams_the_same_text(embedded: RealServer) -> None:
    question: list[Any] = [{"role": "user", "content": "Name the capital of France."}]
    chat = embedded.client.chat.completions
    whole = chat.create(model=EMBEDDED, messages=question, temperature=0, max_tokens=32)
    text = whole.choices[0].message.content
    assert text is not None
    assert "Paris" in text
    assert whole.choices[0].finish_reason in ("stop", "length")
    chunks = list(
        chat.create(
            model=EMBEDDED,
            messages=question,
            temperature=0,
            max_tokens=32,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    # But for the prompt, which is found in the prefix cache the second time, and the passes: how many drafts pay
    # depends on the chances of their acceptance, which are tracked from answer to answer.
    left_out = {"prompt_tokens_details", "macro_steps", "tokens_per_step"}
    streamed, usage = (u.model_dump(exclude=left_out) for u in (chunks[-1].usage, whole.usage))
    assert streamed == usage
    assert usage["kv_slots"] == usage["completion_tokens"]


def test_the_embedded_default_gives_the_text_of_confidence_1_in_fewer_passes(embedded: RealServer) -> None:
    log = embedded.log()
    assert "HAMburger model: its own text, groups of up to 8 verified tokens, drafts where they pay" in log
    assert "curl" in log
    assert embedded.url in log
    question: list[Any] = [{"role": "user", "content": "Count from 1 to 20."}]
    texts: set[str | None] = set()

    def tokens_per_step(**extra: float) -> float:
        answer = embedded.client.chat.completions.create(
            model=EMBEDDED, messages=question, temperature=0, max_tokens=64, extra_body=extra
        )
        assert answer.usage is not None
        told = answer.usage.model_dump()
        assert told["tokens_per_kv"] == 1.0
        texts.add(answer.choices[0].message.content)
        return float(told["tokens_per_step"])

    assert tokens_per_step(confidence=1.0) == 1.0
    assert tokens_per_step(confidence=0.3) >= 1.0
    # Beside a busy test drafts may not pay for a while, so they are asked for again.
    deadline = time.monotonic() + 120
    while tokens_per_step() == 1.0:
        assert time.monotonic() < deadline
    assert len(texts) == 1


@pytest.mark.slow
def test_builtin_is_the_plain_base_and_says_so() -> None:
    with RealServer("builtin", "--max-model-len", "256", "--kv-cache-memory", "64MiB") as server:
        log = server.log()
        assert "plain base model" in log
        assert "its own text, groups of up to 8 verified tokens, drafts where they pay" in log
        model = next(iter(server.client.models.list()))
        assert model.id == "smollm2-135m-instruct"
        answer = server.client.chat.completions.create(model=model.id, messages=MESSAGES, max_tokens=8)
        assert answer.usage is not None
        assert answer.usage.model_dump()["tokens_per_kv"] == 1.0


def test_completions_with_n_and_stop(embedded: RealServer) -> None:
    answer = embedded.client.completions.create(
        model=EMBEDDED, prompt="One, two, three,", n=2, seed=7, temperature=0.8, max_tokens=12, stop=[".", "\n"]
    )
    assert [c.index for c in answer.choices] == [0, 1]
    assert all("." not in c.text for c in answer.choices)


def test_a_seed_repeats_all_choices(grafted: RealServer) -> None:
    """In float32: bfloat16 lets the batch decide near ties, and choices may come into it one step apart."""
    asked = [
        grafted.client.completions.create(model="burger", prompt="One, two,", n=2, seed=seed, max_tokens=12)
        for seed in (7, 7, 8)
    ]
    texts = [[c.text for c in answer.choices] for answer in asked]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0][0] != texts[0][1]


def test_grafted_groups_reach_the_client(grafted: RealServer) -> None:
    answer = grafted.client.chat.completions.create(
        model="burger",
        messages=MESSAGES,
        temperature=0,
        max_tokens=40,
        extra_body={"confidence": 0.0, "return_groups": True, "ignore_eos": True},
    )
    assert answer.usage is not None
    usage = answer.usage.model_dump()
    groups = answer.choices[0].model_dump()["groups"]
    assert [len(group) for group in groups] == [4] * 10
    assert usage["completion_tokens"] == 40
    assert usage["kv_slots"] == 10
    assert usage["tokens_per_kv"] == 4.0
    careful = grafted.client.chat.completions.create(
        model="burger@1.0", messages=MESSAGES, temperature=0, max_tokens=40, extra_body={"ignore_eos": True}
    )
    assert careful.usage is not None
    assert careful.usage.model_dump()["tokens_per_kv"] == 1.0


def test_logprobs_come_one_a_token_in_grouped_chunks(grafted: RealServer) -> None:
    chunks = list(
        grafted.client.chat.completions.create(
            model="burger",
            messages=MESSAGES,
            temperature=0,
            max_tokens=12,
            logprobs=True,
            top_logprobs=2,
            stream=True,
            extra_body={"confidence": 0.0, "return_groups": True, "ignore_eos": True},
        )
    )
    counted = 0
    for chunk in chunks:
        choice = chunk.choices[0]
        group = choice.model_dump().get("group")
        if group is None:
            continue
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert len(choice.logprobs.content) == len(group["token_ids"])
        assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
        counted += len(group["token_ids"])
    assert counted == 12


async def test_32_concurrent_streams_give_their_own_answers(grafted: RealServer) -> None:
    async with AsyncOpenAI(base_url=f"{grafted.url}/v1", api_key="unused", max_retries=0) as api:

        async def ask(i: int) -> str:
            messages: list[Any] = [{"role": "user", "content": f"Question {i}: " + "word " * (5 * i)}]
            stream = await api.chat.completions.create(
                model=f"burger@{0.2 * (i % 6):.1f}", messages=messages, temperature=0, max_tokens=30, stream=True
            )
            return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])

        alone = [await ask(i) for i in range(0, 32, 8)]
        together = await asyncio.gather(*(ask(i) for i in range(32)))
    assert together[::8] == alone
    assert len(set(together)) > 16
    grafted.wait_idle()


@pytest.mark.parametrize(
    ("error", "change"),
    [
        (openai.NotFoundError, {"model": "nope"}),
        (openai.BadRequestError, {"max_tokens": -1}),
        (openai.BadRequestError, {"extra_body": {"confidence": 2}}),
        (openai.BadRequestError, {"messages": [{"role": "user", "content": "word " * 60000}]}),
        (openai.BadRequestError, {"tools": [{"type": "function", "function": {"name": "not a name"}}]}),
    ],
)
def test_errors_are_the_clients_own_exceptions(
    embedded: RealServer, error: type[openai.APIStatusError], change: dict[str, Any]
) -> None:
    request: dict[str, Any] = {"model": EMBEDDED, "messages": MESSAGES, "max_tokens": 5, **change}
    with pytest.raises(error) as caught:
        embedded.client.chat.completions.create(**request)
    body: Any = caught.value.body
    assert body["message"]
    assert set(body) == {"message", "type", "param", "code"}
