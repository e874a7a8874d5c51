"""`echo` on POST /v1/completions: the prompt before its answer, its log-probabilities, and lm_eval's request."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from fakes import BOS, EOS, VOCAB_SIZE, ByteTokenizer, scripted_logprobs
from hamburger.engine.request import RequestUpdate
from hamburger.engine.request_stream import PromptScores
from hamburger.engine.types.errors import EngineDead, OutOfMemory
from hamburger.engine.types.messages import TokenLogprobs
from hamburger.server.completions.echo import Echo
from hamburger.server.completions.logprobs import CompletionLogprobs
from serving import CHAT, COMPLETIONS, HELLO, ByChoice, serving

NAMES = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def loglikelihood(*prompts: list[int], **changes: Any) -> dict[str, Any]:
    """lm_eval's request."""
    fields = {"prompt": list(prompts), "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    return fields | changes


def read_as_lm_eval(choice: dict[str, Any], context: int) -> tuple[float, bool]:
    """The sum of the continuation's log-probabilities, and whether it is greedy: by exact equality."""
    logprobs = choice["logprobs"]
    tokens, tops = logprobs["token_logprobs"][context:-1], logprobs["top_logprobs"][context:-1]
    return sum(tokens), all(logprob == max(top.values()) for logprob, top in zip(tokens, tops, strict=True))


def check_shape(logprobs: dict[str, Any], num_tokens: int) -> None:
    assert tuple(logprobs) == NAMES
    assert [len(logprobs[name]) for name in NAMES] == [num_tokens] * 4
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    for token, logprob, top in list(zip(*(logprobs[name] for name in NAMES[:3]), strict=True))[1:]:
        assert top[token] == logprob


class Guess(ByChoice):
    """Finds token 98 likelier than whatever else the prompt holds."""

    def _score(self, *args: Any) -> list[TokenLogprobs]:
        return [TokenLogprobs(x.logprob, [(98, -0.5)] if x.top[0][0] != 98 else x.top) for x in super()._score(*args)]


@pytest.mark.parametrize("group", [[97], [EOS], [97, 98, 99, 100]])
async def test_lm_eval_s_loglikelihood_request(group: list[int]) -> None:
    prompts = [[BOS, 97, 99, 98, 98], [97], [99, 98], list(range(200))]
    async with serving(runner=Guess([group])) as server:
        answer = await server.ok(COMPLETIONS, loglikelihood(*prompts))
    assert sorted(server.runner.prompts) == sorted(prompts)  # no BOS was added
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    for choice, prompt in zip(answer["choices"], prompts, strict=True):
        logprobs = choice["logprobs"]
        check_shape(logprobs, len(prompt) + 1)
        expected = [scripted_logprobs(1000 + i, token, 1).logprob for i, token in enumerate(prompt)]
        assert logprobs["token_logprobs"][1:-1] == expected[1:]
        assert read_as_lm_eval(choice, 1) == (sum(expected[1:]), set(prompt[1:]) <= {98})
    assert read_as_lm_eval(answer["choices"][0], 3)[1]
    assert answer["usage"]["prompt_tokens"] == 208
    assert answer["usage"]["completion_tokens"] == 4


async def test_max_tokens_0_gives_the_prompt_alone() -> None:
    async with serving([[97]]) as server:
        answer = await server.ok(COMPLETIONS, loglikelihood([97, 98], [99], max_tokens=0, return_groups=True))
        silent = await server.complete(prompt="ab", echo=True, max_tokens=0)
        chunks = await server.stream(
            COMPLETIONS, prompt="ab", echo=True, max_tokens=0, logprobs=0, return_groups=True, add_special_tokens=False
        )
        assert (await server.complete(prompt="ab", echo=True, max_completion_tokens=0))["choices"] == silent["choices"]
        longest = await server.ok(COMPLETIONS, loglikelihood([97] * 256, max_tokens=0))
        cut = await server.ok(COMPLETIONS, loglikelihood([97] * 300, max_tokens=0, truncate_prompt_tokens=-1))
        assert cut["usage"] == longest["usage"]
    first, second = answer["choices"]
    check_shape(first["logprobs"], 2)
    check_shape(second["logprobs"], 1)
    assert (first["text"], first["finish_reason"], first["groups"]) == ("ab", "length", [])
    assert answer["usage"]["completion_tokens"] == answer["usage"]["kv_slots"] == 0
    assert (silent["choices"][0]["text"], silent["choices"][0]["logprobs"]) == ("ab", None)
    chunk, end = chunks
    assert (chunk["choices"][0]["text"], chunk["choices"][0]["finish_reason"]) == ("ab", None)
    assert (end["choices"][0]["text"], end["choices"][0]["finish_reason"]) == ("", "length")
    assert not any("group" in piece["choices"][0] for piece in chunks)
    check_shape(chunk["choices"][0]["logprobs"], 2)
    check_shape(longest["choices"][0]["logprobs"], 256)
    assert server.runner.emitted == {}


async def test_text_as_the_client_wrote_it_and_text_of_ids() -> None:
    async with serving([[120, EOS]]) as server:
        written = await server.complete(prompt="a<eos>é", echo=True)
        of_ids = await server.complete(prompt=[BOS, 97, 0xC3, 0xA9], echo=True)
        bare = await server.complete(prompt=[BOS, 97])
    assert server.runner.prompts[0] == [BOS, 97, EOS, 0xC3, 0xA9]
    assert written["choices"][0]["text"] == "a<eos>éx"
    assert written["choices"][0]["logprobs"] is None
    assert of_ids["choices"][0]["text"] == "<bos>aéx"
    assert bare["choices"][0]["text"] == "x"
    assert server.runner.num_scored == 0


@pytest.mark.parametrize(
    ("prompt", "text", "offsets"),
    [
        ("aéb", "aébxéy", [0, 0, 1, 1, 2, 3, 4, 4, 5, 6]),  # the BOS is not in the text
        ([BOS, 97, EOS, 98], "<bos>a<eos>bxéy", [0, 5, 6, 11, 12, 13, 13, 14, 15]),
        ([0xA9, 97], "\ufffdaxéy", [0, 1, 2, 3, 3, 4, 5]),
        ([97, 0xE2, 0x86], "a\ufffdxéy", [0, 1, 1, 2, 3, 3, 4, 5]),
        ("<eos>", "<eos>xéy", [0, 0, 5, 6, 6, 7, 8]),
    ],
)
async def test_text_offsets(prompt: Any, text: str, offsets: list[int]) -> None:
    async with serving([[120, 0xC3], [0xA9, 121], [EOS]]) as server:
        answer = await server.complete(prompt=prompt, echo=True, logprobs=1)
        chunks = await server.stream(COMPLETIONS, prompt=prompt, echo=True, logprobs=1)
    [choice] = answer["choices"]
    assert choice["text"] == text
    assert choice["logprobs"]["text_offset"] == offsets
    check_shape(choice["logprobs"], len(offsets))
    for name in NAMES:
        assert [x for chunk in chunks for x in chunk["choices"][0]["logprobs"][name]] == choice["logprobs"][name]


async def test_the_first_event_brings_the_prompt() -> None:
    groups = [[120, 121], [122], [EOS]]
    async with serving(groups) as server:
        chunks = await server.stream(COMPLETIONS, prompt=[97, 98], echo=True, logprobs=1, return_groups=True)
        plain = await server.stream(COMPLETIONS, prompt=[97, 98], echo=True)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["text"] for choice in choices] == ["abxy", "z", ""]
    assert [choice["group"]["token_ids"] for choice in choices] == groups
    assert [choice["logprobs"]["tokens"] for choice in choices] == [["a", "b", "x", "y"], ["z"], ["<eos>"]]
    assert [(c["choices"][0]["text"], c["choices"][0]["logprobs"]) for c in plain] == [
        ("abxy", None),
        ("z", None),
        ("", None),
    ]


@pytest.mark.parametrize("logprobs", [None, 0, 2])
async def test_n_answers_to_each_of_several_prompts(logprobs: int | None) -> None:
    scripts = [[[120 + i], [EOS]] for i in range(4)]
    async with serving(*scripts) as server:
        answer = await server.complete(prompt=["a", "bc"], n=2, echo=True, logprobs=logprobs)
        chunks = await server.stream(COMPLETIONS, prompt=["a", "bc"], n=2, echo=True, logprobs=logprobs)
    texts = ["ax", "ay", "bcz", "bc{"]
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == list(enumerate(texts))
    streamed = [[chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == i] for i in range(4)]
    assert ["".join(piece["text"] for piece in pieces) for pieces in streamed] == texts
    for choice, num_tokens in zip(answer["choices"], (4, 4, 5, 5), strict=True):
        if logprobs is None:
            assert choice["logprobs"] is None
        else:
            check_shape(choice["logprobs"], num_tokens)
            assert all(len(top) == max(logprobs, 1) for top in choice["logprobs"]["top_logprobs"][1:])
    assert server.runner.num_scored == (0 if logprobs is None else 2 * (1 + 2))  # once for both answers


async def test_32_at_once() -> None:
    prompts = [[(i + j) % BOS for j in range(1 + 7 * i)] for i in range(32)]
    async with serving([[97, 98]], max_num_batched_slots=20, num_blocks=80) as server:
        answers = await asyncio.gather(*(server.ok(COMPLETIONS, loglikelihood(prompt)) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        [choice] = answer["choices"]
        check_shape(choice["logprobs"], len(prompt) + 1)
        expected = [scripted_logprobs(1000 + i, token, 1).logprob for i, token in enumerate(prompt)]
        assert choice["logprobs"]["token_logprobs"][1:-1] == expected[1:]


async def test_a_stop_string_is_looked_for_in_the_answer_alone() -> None:
    async with serving([[120], [121], [EOS]]) as server:
        answer = await server.complete(prompt="xy", echo=True, stop=["y"], logprobs=0, add_special_tokens=False)
    assert answer["choices"][0]["text"] == "xyx"
    assert answer["choices"][0]["stop_reason"] == "y"
    assert answer["choices"][0]["logprobs"]["tokens"] == ["x", "y", "x", "y"]


class Broken(ByChoice):
    def _score(self, *args: Any) -> list[TokenLogprobs]:
        nothing, infinite = float("nan"), float("-inf")
        return [TokenLogprobs(infinite, [(98, nothing), (99, infinite)]) for _ in super()._score(*args)]


async def test_no_nan_and_no_infinity_leaves_the_server() -> None:
    async with serving(runner=Broken([[97]])) as server:
        response = await server.post(COMPLETIONS, loglikelihood([97, 98, 99], logprobs=2))
    logprobs = json.loads(response.text, parse_constant=pytest.fail)["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"][:3] == [None, -9999.0, -9999.0]
    assert logprobs["top_logprobs"][1:3] == [{"b": -9999.0, "c": -9999.0}] * 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [VOCAB_SIZE]}, "prompt"), ({"prompt": [-1]}, "prompt"), ({"prompt": [97] * 256}, "prompt"),
        ({"prompt": [97] * 257, "max_tokens": 0}, "prompt"), ({"logprobs": 21}, "logprobs"),
        ({"max_tokens": -1}, "max_tokens"), ({"max_tokens": 0, "echo": False}, "max_tokens"),
        ({"max_tokens": 0, "min_tokens": 1}, "min_tokens"), ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ],
)  # fmt: skip
async def test_what_is_refused(fields: dict[str, Any], param: str) -> None:
    async with serving([[97]]) as server:
        status, error = await server.refused(COMPLETIONS, loglikelihood([97]) | fields)
    assert (status, error["param"]) == (400, param), error


async def test_chat_does_not_echo() -> None:
    async with serving([[97]]) as server:
        assert (await server.refused(CHAT, {"messages": HELLO, "echo": True}))[1]["param"] == "echo"


class SpaceCutting(ByteTokenizer):
    """Cuts the space in front of a text, as sentencepiece tokenizers do."""

    def token_bytes(self, token_id: int, *, first: bool = False) -> bytes:
        data = {0: b" the", 1: b" sky"}.get(token_id) or super().token_bytes(token_id)
        return data.removeprefix(b" ") if first else data


def test_a_space_that_begins_an_answer_is_not_cut_behind_a_prompt() -> None:
    tokenizer, entry = SpaceCutting(), TokenLogprobs(-1.0, [])
    for echo in (Echo(tokenizer, [BOS, 0, 0], "the the"), Echo(tokenizer, [BOS, 0, 0], None)):
        update = RequestUpdate(" sky", [1, EOS], [1.0, 1.0], [entry, entry], 2, 1, None, None, [None, entry, entry])
        offsets = CompletionLogprobs(tokenizer, True, echo)(update)["text_offset"]
        assert offsets[-2:] == [len(echo.text), len(echo.text + " sky")]
    assert Echo(tokenizer, [BOS, 0, 0, 0], "the the the").offsets() == [0, 0, 3, 7]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_goes_on_with_a_text_keeps_the_space_that_it_begins_with(stream: bool) -> None:
    async with serving([[0], [1, EOS]], tokenizer=SpaceCutting()) as server:

        async def text_of(path: str, **fields: Any) -> str:
            if not stream:
                [choice] = (await server.ok(path, fields))["choices"]
                return str(choice["text"] if path == COMPLETIONS else choice["message"]["content"])
            choices = [chunk["choices"][0] for chunk in await server.stream(path, **fields)]
            told = (c["text"] if path == COMPLETIONS else c["delta"].get("content") for c in choices)
            return "".join(text or "" for text in told)

        assert await text_of(COMPLETIONS, prompt="ab") == " the sky"
        assert await text_of(COMPLETIONS, prompt="ab", echo=True) == "ab the sky"
        assert await text_of(CHAT, messages=HELLO) == "the sky"
        begun = {"messages": [*HELLO, {"role": "assistant", "content": "ab"}], "add_generation_prompt": False}
        assert await text_of(CHAT, **begun, continue_final_message=True) == " the sky"
        answer = await server.complete(logprobs=0)
    assert answer["choices"][0]["logprobs"]["text_offset"] == [0, 4, 8]


def test_offsets_stay_inside_a_text_that_the_tokenizer_changed() -> None:
    decomposed = Echo(ByteTokenizer(), [*"e\u0301".encode(), *"e\u0301".encode()], "\u00e9\u00e9")
    assert decomposed.offsets() == [0, 1, 1, 2, 2, 2]


async def test_a_request_without_echo_scores_nothing() -> None:
    async with serving([[97], [EOS]]) as server:
        await server.complete(prompt=[1, 2, 3], logprobs=2)
        await server.chat(logprobs=True, top_logprobs=2)
    assert server.runner.num_scored == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 3])
async def test_a_prompt_is_scored_once_for_all_its_choices(stream: bool, max_tokens: int) -> None:
    runner = ByChoice(*[[[97], [98], [EOS]]] * 8)
    body = loglikelihood([BOS, 97, 99, 98], [97, 98], max_tokens=max_tokens, n=4, temperature=1)
    async with serving(runner=runner) as server:
        if stream:
            chunks = await server.stream(COMPLETIONS, **body)
            firsts = {c["choices"][0]["index"]: c["choices"][0]["logprobs"] for c in reversed(chunks) if c["choices"]}
            found = [firsts[i]["token_logprobs"] for i in range(8)]
        else:
            answer = await server.ok(COMPLETIONS, body)
            found = [choice["logprobs"]["token_logprobs"] for choice in answer["choices"]]
    assert runner.num_scored == 3 + 1
    for i, prompt in enumerate([[BOS, 97, 99, 98]] * 4 + [[97, 98]] * 4):
        expected = [scripted_logprobs(1000 + j, token, 1).logprob for j, token in enumerate(prompt)]
        assert found[i][1 : len(prompt)] == expected[1:]


async def test_prompts_of_other_salts_or_numbers_are_scored_for_themselves() -> None:
    runner = ByChoice(*[[[EOS]]] * 2)
    async with serving(runner=runner) as server:
        for salt in ("a", "b"):
            await server.ok(COMPLETIONS, loglikelihood([97, 98, 99], cache_salt=salt))
    assert runner.num_scored == 4


async def test_answers_that_wait_for_the_scores_fail_with_what_scores() -> None:
    scores = PromptScores()
    scores.give_up(OutOfMemory("no room", 1))
    for _ in range(2):
        with pytest.raises(OutOfMemory, match="no room"):
            await scores.known
    left = PromptScores()
    left.give_up(None)
    with pytest.raises(EngineDead, match="was not scored"):
        await left.known
    told = PromptScores()
    told.tell([None])
    told.give_up(None)
    assert await told.known == [None]
