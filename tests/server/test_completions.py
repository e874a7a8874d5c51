"""POST /v1/completions: the four forms of a prompt, n, and log-probabilities in their own shape."""

import json
from typing import Any

import pytest
from fastapi.responses import JSONResponse, StreamingResponse

from fakes import BOS, EOS, ByteTokenizer, scripted_logprobs
from hamburger.engine.request import RequestUpdate
from hamburger.engine.types.messages import TokenLogprobs
from hamburger.server.api.streaming import whole_response
from hamburger.server.completions.logprobs import CompletionLogprobs
from serving import COMPLETIONS, ByChoice, serving, split

DONE = [[EOS]]


async def test_the_whole_answer_and_its_stream() -> None:
    async with serving([*split("xyz", 2, 1), [EOS]]) as server:
        whole = await server.complete(echo=False, suffix=None, best_of=1)
        chunks = await server.stream(COMPLETIONS)
    assert whole["id"].startswith("cmpl-")
    assert whole["object"] == "text_completion"
    expected = {"index": 0, "text": "xyz", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    assert whole["choices"] == [expected]
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["xy", "z", ""]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [[BOS, 97, 98]]),
        (["ab", "c"], [[BOS, 97, 98], [BOS, 99]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ],
)
async def test_the_four_forms_of_a_prompt(prompt: object, expected: list[list[int]]) -> None:
    async with serving(DONE) as server:
        answer = await server.complete(prompt=prompt)
    assert server.runner.prompts == expected
    assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))


async def test_special_tokens_can_be_left_out() -> None:
    async with serving(DONE) as server:
        await server.complete(prompt="ab", add_special_tokens=False)
    assert server.runner.prompts == [[97, 98]]


async def test_the_index_is_prompt_times_n_plus_choice() -> None:
    scripts = [[list(b"abcd"[i : i + 1]), [EOS]] for i in range(4)]
    async with serving(*scripts) as server:
        whole = await server.complete(prompt=["p", "q"], n=2)
        chunks = await server.stream(COMPLETIONS, prompt=["p", "q"], n=2)
    assert [(choice["index"], choice["text"]) for choice in whole["choices"]] == [
        (0, "a"),
        (1, "b"),
        (2, "c"),
        (3, "d"),
    ]
    streamed = ["", "", "", ""]
    for chunk in chunks:
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert streamed == ["a", "b", "c", "d"]


async def test_16_tokens_are_the_default_and_null_is_all_that_fits() -> None:
    async with serving([[97]] * 300, max_model_len=40) as server:
        default = await server.complete(prompt=[1, 2])
        most = await server.complete(prompt=[1, 2], max_tokens=None)
    assert default["usage"]["completion_tokens"] == 16
    assert most["usage"]["completion_tokens"] == 38


async def test_logprobs_are_parallel_lists_and_hold_the_token_itself() -> None:
    groups = [[97, 0xC3], [0xA9, 98], [EOS]]
    async with serving(groups) as server:
        whole = await server.complete(logprobs=2)
        chunks = await server.stream(COMPLETIONS, logprobs=2)
        bare = await server.complete(logprobs=0)
    logprobs = whole["choices"][0]["logprobs"]
    assert whole["choices"][0]["text"] == "aéb"
    assert logprobs["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "b", "<eos>"]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 3]
    assert logprobs["token_logprobs"][0] == scripted_logprobs(0, 97, 0).logprob
    tops = logprobs["top_logprobs"]
    assert [len(top) for top in tops] == [2] * 5
    assert [top[t] for top, t in zip(tops, logprobs["tokens"], strict=True)] == logprobs["token_logprobs"]
    for name, values in logprobs.items():
        assert [v for chunk in chunks for v in chunk["choices"][0]["logprobs"][name]] == values
    assert bare["choices"][0]["logprobs"]["top_logprobs"][0] == {"a": logprobs["token_logprobs"][0]}


def test_a_token_that_is_no_top_one_is_added_and_infinities_are_clamped() -> None:
    shape = CompletionLogprobs(ByteTokenizer(), skip_special_tokens=True)
    entries = [TokenLogprobs(float("-inf"), [(98, -0.5)]), TokenLogprobs(float("nan"), [(97, float("nan"))])]
    got = shape(RequestUpdate("aa", [97, 97], [1.0, 1.0], entries, 2, 1, None, None))
    assert got["token_logprobs"] == [-9999.0, -9999.0]
    assert got["top_logprobs"] == [{"b": -0.5, "a": -9999.0}, {"a": -9999.0}]


async def test_stop_token_ids_and_min_tokens() -> None:
    async with serving([list(b"ab"), list(b"cb"), [EOS]]) as server:
        first = await server.complete(stop_token_ids=[98], return_groups=True)
        later = await server.complete(stop_token_ids=[98], min_tokens=3)
    assert first["choices"][0]["stop_reason"] == 98
    assert first["choices"][0]["finish_reason"] == "stop"
    assert first["choices"][0]["groups"] == [[97, 98]]
    assert later["usage"]["completion_tokens"] == 4


async def test_ignore_eos_and_special_tokens_in_the_text() -> None:
    async with serving([[97, EOS], [98]]) as server:
        ends = await server.complete()
        goes_on = await server.complete(ignore_eos=True, max_tokens=3)
        shown = await server.complete(ignore_eos=True, max_tokens=3, skip_special_tokens=False)
    assert ends["choices"][0]["text"] == "a"
    assert ends["usage"]["completion_tokens"] == 2
    assert goes_on["choices"][0]["text"] == "ab"
    assert shown["choices"][0]["text"] == "a<eos>b"


async def test_best_of_gives_the_likeliest_first_and_counts_all() -> None:
    # The script's log-probabilities fall with the place in the answer, so the shortest is the likeliest per token.
    runner = ByChoice([[*b"long"], [EOS]], [[*b"a"], [EOS]], [[*b"me"], [EOS]], [[*b"longest"], [EOS]])
    async with serving(runner=runner) as server:
        answer = await server.complete(n=2, best_of=4)
        assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [(0, "a"), (1, "me")]
        assert answer["usage"]["completion_tokens"] == 5 + 2 + 3 + 8
        assert all(choice["logprobs"] is None for choice in answer["choices"])
        two = await server.complete(prompt=["x", "y"], n=1, best_of=2, logprobs=1)
        assert [choice["index"] for choice in two["choices"]] == [0, 1]
        assert two["choices"][0]["logprobs"]["tokens"][0] == "a"
        status, error = await server.refused(COMPLETIONS, {"prompt": "a", "best_of": 2, "stream": True})
        assert (status, error["param"]) == (400, "best_of")


async def test_an_answer_that_is_encoded_choice_by_choice_is_the_same_json() -> None:
    whole = {"id": "x", "choices": [{"index": 0, "text": 'a"é\u2028'}, {"index": 1, "text": ""}], "usage": {"n": 1}}
    long = {"index": 2, "text": '"choices":[]' * 50_000}
    answers: list[dict[str, Any]] = [whole, {**whole, "choices": []}, {**whole, "choices": [long, long, long]}]
    for answer in answers:
        response = await whole_response(answer)
        if isinstance(response, StreamingResponse):
            pieces = [piece async for piece in response.body_iterator]
            assert len(pieces) == 3  # two choices, the third, the end
            data = b"".join(piece for piece in pieces if isinstance(piece, bytes))
        else:
            data = bytes(response.body)
        assert data == JSONResponse(answer).body
        assert list(json.loads(data)) == ["id", "choices", "usage"]
    assert isinstance(response, StreamingResponse)
