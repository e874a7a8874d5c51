"""Verified groups on the wire: what was drafted and accepted, in groups, usage, metrics and the log."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from drafting import CHANCE, drafting
from hamburger.engine.dial.confidence_dial import AutoConfidence
from hamburger.model.config import ConfigError
from serving import CHAT, COMPLETIONS, MODEL, Served, groups_of, serving, split

MICRO = {1: "bcX", 4: "e"}  # two right ones and a wrong one; one right one
TEXT = "abcdef"
GROUPS = [[*b"a"], [*b"bcd"], [*b"ef"]]


def text_of(chunks: list[dict[str, Any]]) -> str:
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"])


async def test_groups_are_macro_steps_and_slots_are_tokens() -> None:
    async with drafting(TEXT, MICRO) as server:
        answer = await server.chat(max_tokens=6, return_groups=True)
    [choice] = answer["choices"]
    assert choice["message"]["content"] == TEXT
    assert choice["groups"] == GROUPS
    usage = answer["usage"]
    assert (usage["completion_tokens"], usage["kv_slots"], usage["tokens_per_kv"]) == (6, 6, 1.0)
    assert (usage["macro_steps"], usage["tokens_per_step"]) == (3, 2.0)
    assert "completion_tokens_details" not in usage


async def test_streamed_groups_show_what_was_drafted_and_accepted() -> None:
    async with drafting(TEXT, MICRO) as server:
        chunks = await server.stream(CHAT, max_tokens=6, return_groups=True, stream_options={"include_usage": True})
    *pieces, last = chunks
    assert text_of(chunks) == TEXT
    groups = groups_of(pieces)
    assert groups == [
        {"index": 0, "token_ids": [*b"a"], "stop_probs": [0.5]},
        {
            "index": 1, "token_ids": [*b"bcd"], "stop_probs": [0.5] * 3,
            "drafted": [*b"bcX"], "accepted": 2, "chances": [CHANCE] * 3, "drafter": "micro",
        },
        {
            "index": 2, "token_ids": [*b"ef"], "stop_probs": [0.5] * 2,
            "drafted": [*b"e"], "accepted": 1, "chances": groups[2]["chances"], "drafter": "micro",
        },
    ]  # fmt: skip
    assert 0 < groups[2]["chances"][0] < 1
    assert (last["usage"]["macro_steps"], last["usage"]["kv_slots"]) == (3, 6)
    assert pieces[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all("role" not in piece["choices"][0]["delta"] for piece in pieces[1:])


async def test_composed_groups_show_no_drafts() -> None:
    async with serving(split("abc", 1, 2)) as server:
        *pieces, _ = await server.stream(CHAT, max_tokens=3, return_groups=True)
        assert all("drafted" not in piece["choices"][0]["group"] for piece in pieces)
        usage = (await server.chat(max_tokens=3))["usage"]
        assert (usage["macro_steps"], usage["kv_slots"]) == (2, 2)
        assert usage["tokens_per_step"] == usage["tokens_per_kv"] == 1.5


@pytest.mark.parametrize(
    ("ending", "text", "num_tokens", "accepted"),
    [
        ({"stop": "b", "max_tokens": 6}, "a", 2, 1),  # completes at the first accepted draft
        ({"stop": "c", "max_tokens": 6}, "ab", 3, 2),
        ({"stop": "d", "max_tokens": 6}, "abc", 4, 2),  # at the trunk's own token behind them
        ({"stop_token_ids": [*b"b"], "max_tokens": 6}, "a", 2, 1),
        ({"stop_token_ids": [*b"b"], "include_stop_str_in_output": True, "max_tokens": 6}, "ab", 2, 1),
        ({"max_tokens": 3}, "abc", 3, 1),  # of three drafts only one had a place
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_drafts_behind_the_end_were_never_tokens(
    ending: dict[str, Any], text: str, num_tokens: int, accepted: int, stream: bool
) -> None:
    async with drafting(TEXT, MICRO) as server:
        if stream:
            options = {"include_usage": True}
            chunks = await server.stream(CHAT, return_groups=True, logprobs=True, stream_options=options, **ending)
            usage, content = chunks[-1]["usage"], text_of(chunks)
            assert sum(group.get("accepted", 0) for group in groups_of(chunks)) == accepted
            logprobs = [chunk["choices"][0]["logprobs"] for chunk in chunks[:-1]]
            entries = [entry for found in logprobs if found is not None for entry in found["content"]]
        else:
            answer = await server.chat(return_groups=True, logprobs=True, **ending)
            [choice], usage = answer["choices"], answer["usage"]
            content, entries = choice["message"]["content"], choice["logprobs"]["content"]
            assert sum(map(len, choice["groups"])) == num_tokens
    assert content == text
    assert usage["completion_tokens"] == usage["kv_slots"] == len(entries) == num_tokens
    assert usage["macro_steps"] == 2


async def test_metrics_count_drafts_by_drafter_and_position() -> None:
    async with drafting(TEXT, MICRO) as server:
        for drafter in ("micro", "lookup", "prediction", "grammar"):  # they are there before the first draft
            for family in ("drafted_tokens_total", "accepted_tokens_total"):
                assert [server.metric(family, drafter=drafter, position=str(i)) for i in (1, 7)] == [0, 0]
        await server.chat(max_tokens=6)
        for family, counts in {"drafted": [2, 1, 1, 0], "accepted": [2, 1, 0, 0]}.items():
            for position, count in enumerate(counts, start=1):
                found = server.metric(f"{family}_tokens_total", drafter="micro", position=str(position))
                assert found == count, (family, position)
        assert server.metric("kv_slots_total", kind="generated") == server.metric("generation_tokens_total") == 6
        assert server.metric("macro_steps_total") == server.metric("group_size_count") == 3
        assert server.metric("tokens_per_kv_ratio") == 1
        assert server.metric("tokens_per_macro_step") == 2
        assert server.metric("cache_config_info", groups="verified") == 1


async def test_metrics_count_no_draft_that_an_end_cut_off() -> None:
    async with drafting(TEXT, MICRO) as server:
        await server.chat(max_tokens=6, stop_token_ids=[*b"b"])
        assert server.metric("drafted_tokens_total", drafter="micro", position="2") == 1
        assert server.metric("accepted_tokens_total", drafter="micro", position="1") == 1
        assert server.metric("accepted_tokens_total", drafter="micro", position="2") == 0


async def test_a_plain_base_has_no_micro_decoder_to_count() -> None:
    async with drafting("ababab", info={"is_plain_base": True}) as server:
        await server.chat(max_tokens=6)
        with pytest.raises(KeyError):
            server.metric("drafted_tokens_total", drafter="micro")
        assert server.metric("accepted_tokens_total", drafter="lookup", position="1") > 0


async def test_the_requests_line_counts_drafts(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hamburger.request")
    async with drafting(TEXT, MICRO) as server:
        await server.chat(max_tokens=6)
    [record] = [record for record in caplog.records if record.name == "hamburger.request"]
    fields = record.__dict__["fields"]
    counts = ("kv_slots", "tokens_per_kv", "macro_steps", "tokens_per_step", "drafted_tokens", "accepted_tokens")
    assert [fields[name] for name in counts] == [6, 1.0, 3, 2.0, 4, 3]


@pytest.mark.parametrize("asked", [{"confidence": 1}, {"model": f"{MODEL}@1"}, {"confidence": 0.9}])
async def test_confidence_takes_drafts_away_and_changes_no_text(asked: dict[str, Any]) -> None:
    async with drafting(TEXT, MICRO) as server:
        answer = await server.chat(max_tokens=6, **asked)
    assert answer["choices"][0]["message"]["content"] == TEXT
    assert answer["usage"]["tokens_per_step"] == 1.0


async def test_the_fingerprint_tells_how_groups_are_served() -> None:
    async def fingerprint(server: Served) -> str:
        return str((await server.ok(COMPLETIONS, {"prompt": "a"}))["system_fingerprint"])

    async with drafting(TEXT) as verified, serving(split("ab", 1, 1)) as composed:
        assert await fingerprint(verified) != await fingerprint(composed)


async def test_confidence_auto_is_refused_at_start() -> None:
    with pytest.raises(
        ConfigError, match=r"confidence is auto, but the groups of fake are verified: .*--groups composed"
    ):
        async with drafting(TEXT, auto=AutoConfidence(target_seconds=0.05)):
            pass
