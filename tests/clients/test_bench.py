"""The load generator: its figures from scripted times, and its runs against a real HTTP server."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from bench_runs import run_bench
from hamburger.clients import bench, load
from hamburger.clients.bench_report import Level, Measured, print_tables
from hamburger.clients.connection import Clients
from hamburger.clients.figures import Answer, summarise
from hamburger.clients.load import Job, poisson_offsets
from hamburger.clients.prompts import built_in_prompts, endless_prompts
from scripted_server import Reply, ScriptedServer, drafting_stream, hamburger_stream, plain_stream, sse


def test_prompts_have_their_length_and_differ_from_the_first_word() -> None:
    for words in (1, 5, 40, 500):
        prompts = built_in_prompts(30, words, seed=3)
        assert {len(prompt.split()) for prompt in prompts} == {words}
        assert len({prompt.split()[0] for prompt in prompts}) == 30
    assert built_in_prompts(3, 50, seed=1) == built_in_prompts(3, 50, seed=1) != built_in_prompts(3, 50, seed=2)
    first, other = (list(islice(endless_prompts(50, 1, variant), 30)) for variant in (0, 1))
    assert not {prompt.split()[0] for prompt in first} & {prompt.split()[0] for prompt in other}
    assert [prompt.split()[1:] for prompt in first] == [prompt.split()[1:] for prompt in other]


def test_poisson_arrivals_begin_at_once_and_have_the_rate() -> None:
    offsets = poisson_offsets(4000, rate=5.0, seed=0)
    assert offsets[0] == 0
    assert offsets == sorted(offsets)
    for number in (2, 8, 4000):
        assert poisson_offsets(number, 5.0, seed=0)[-1] == pytest.approx((number - 1) / 5)
    assert poisson_offsets(1, 5.0, seed=0) == [0]
    gaps = [b - a for a, b in pairwise(offsets)]
    assert sum(gap > 0.2 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03)  # exp(-1): not evenly spaced


def test_a_request_has_only_the_fields_that_were_asked_for() -> None:
    plain = Job(model="m", endpoint="completions", output_tokens=9, groups=False).body("p")
    usage = {"include_usage": True}
    assert plain == {
        "model": "m", "prompt": "p", "max_tokens": 9, "temperature": 0, "stream": True, "stream_options": usage
    }  # fmt: skip
    full = Job(model="m", endpoint="chat", output_tokens=9, confidence=0.0, ignore_eos=True).body("p")
    assert full["messages"] == [{"role": "user", "content": "p"}]
    assert (full["confidence"], full["ignore_eos"], full["return_groups"]) == (0.0, True, True)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_a_run_prints_and_writes_its_figures(
    server: ScriptedServer, endpoint: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    server.tokens_per_word = 2
    server.replies = [Reply(hamburger_stream([("a b c", 3), ("d", 1)], chat=endpoint == "chat"))]
    figures = tmp_path / "figures.json"
    arguments = ("--concurrency", "1,3", "--requests", "5", "--confidence", "0.6,1", "--prompt-tokens", "40")
    code = run_bench(server, *arguments, "--endpoint", endpoint, "--json", str(figures), "--api-key", "secret")
    assert code == 0
    assert len(server.requests) == 2 * 2 * (5 + 1)
    assert [request["confidence"] for request in server.requests] == [0.6] * 12 + [1.0] * 12
    assert set(server.keys) == {"Bearer secret"}
    texts = [r["messages"][0]["content"] if endpoint == "chat" else r["prompt"] for r in server.requests]
    assert len(set(texts)) == len(texts)
    assert {len(text.split()) for text in texts} == {20}
    out = capsys.readouterr().out
    assert f"tiny at {server.url}, {endpoint}" in out
    for word in ("3 in flight", "0.6", "2.00", "TTFT", "TPOT", "ITL", "E2E", "p99", "counted by the server's usage"):
        assert word in out
    assert "failed:" not in out
    text = figures.read_text(encoding="utf-8")
    assert "secret" not in text
    report = json.loads(text)
    assert (report["model"], report["asked"]["endpoint"], report["asked"]["prompt_tokens"]) == ("tiny", endpoint, 40)
    assert [(level["concurrency"], level["confidence"]) for level in report["levels"]] == [
        (1, 0.6), (3, 0.6), (1, 1.0), (3, 1.0)
    ]  # fmt: skip
    level = report["levels"][1]
    assert (level["ok"], level["output_tokens"], level["prompt_tokens"], level["tokens_per_kv"]) == (5, 20, 25, 2.0)
    request = level["requests"][4]
    assert (request["completion_tokens"], request["kv_slots"], request["finish_reason"]) == (4, 2, "stop")
    assert [tokens for _, tokens in request["arrivals"]] == [3, 1]


def test_a_server_without_usage_groups_or_tokenize(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.replies = [Reply(plain_stream(["a", "b"]))]
    assert run_bench(server, "--concurrency", "2", "--requests", "3", "--no-groups", "--prompt-tokens", "40") == 0
    assert "return_groups" not in server.requests[0]
    assert len(server.requests[0]["messages"][0]["content"].split()) == 30
    out = capsys.readouterr().out
    assert "one token an event" in out
    assert " - " in out


def test_a_run_has_prompts_of_its_own_unless_a_seed_is_given(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.replies = [Reply(hamburger_stream([("a", 1), ("b", 1)]))]
    figures, prompts = tmp_path / "figures.json", []
    for seed in ([], [], ["--seed", "7"], ["--seed", "7"]):
        server.requests.clear()
        assert run_bench(server, "--concurrency", "1", "--requests", "2", "--json", str(figures), *seed) == 0
        prompts.append([request["messages"][0]["content"] for request in server.requests])
        told = json.loads(figures.read_text(encoding="utf-8"))["asked"]["seed"]
        assert f"Prompts and times are those of --seed {told}." in capsys.readouterr().out
    assert told == 7
    assert prompts[0] != prompts[1]
    assert prompts[2] == prompts[3]


def test_what_the_prefix_cache_had_is_told(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    usage = {"prompt_tokens": 8, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 6}}
    *stream, done = plain_stream(["a", "b"])
    server.replies = [Reply([*stream, sse({"choices": [], "usage": usage}), done])]
    assert run_bench(server, "--concurrency", "1", "--requests", "2") == 0
    assert "1 in flight: 75% of the prompts' tokens were in the server's prefix cache." in capsys.readouterr().out


async def test_a_whole_answer_ends_with_its_mark_and_keeps_its_connection(server: ScriptedServer) -> None:
    job = Job(model="m", endpoint="chat", output_tokens=9)
    server.replies = [Reply(plain_stream(["a"]))]
    async with httpx.AsyncClient(base_url=server.url) as client:
        opened: list[str] = []

        async def note(event: str, _: object) -> None:
            opened.append(event)

        async def traced(request: httpx.Request) -> None:
            request.extensions["trace"] = note

        client.event_hooks["request"] = [traced]
        for _ in range(3):
            assert (await load.ask(client, job, "p")).error is None
        assert opened.count("connection.connect_tcp.complete") == 1
        server.replies = [Reply(plain_stream(["a"]), hang=True)]
        answer = await load.ask(client, job, "p")
    assert answer.error is None
    assert answer.e2e is not None
    assert answer.e2e < 1  # the wait for its end is none of the answer's


def test_levels_have_the_same_work_and_no_prompt_of_another(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.replies = [Reply(hamburger_stream([("a", 1), ("b", 1)]))]
    asked = ("--confidence", "0,1", "--concurrency", "1", "--requests", "3", "--prompt-tokens", "40")
    assert run_bench(server, *asked) == 0
    texts = [request["messages"][0]["content"].split(maxsplit=1) for request in server.requests]
    assert [rest for _, rest in texts[:4]] == [rest for _, rest in texts[4:]]
    assert len({first for first, _ in texts}) == 8
    dataset = tmp_path / "prompts.jsonl"
    dataset.write_text("".join(json.dumps({"prompt": name}) + "\n" for name in "abcdef"), encoding="utf-8")
    more = ("--dataset", str(dataset), "--concurrency", "1", "--requests", "2")
    for groups in ([], ["--no-groups"]):
        server.requests.clear()
        assert run_bench(server, *more, "--confidence", "0,1", *groups) == 0
        assert [request["messages"][0]["content"] for request in server.requests] == ["a", "b", "c"] * 2
        salts = [request.get("cache_salt") for request in server.requests]
        assert len(set(salts)) == (1 if groups else 2)
        assert (salts[0] is None) == bool(groups)
    capsys.readouterr()
    assert run_bench(server, "--concurrency", "1,4", "--requests", "2", "--warm-up", "0") == 0
    assert "4 in flight needs as many requests: 4, not 2." in capsys.readouterr().err


def test_warm_ups_of_an_open_loop_come_one_by_one(server: ScriptedServer) -> None:
    running = []

    def answer(body: dict[str, Any]) -> Reply:
        running.append(len(server.requests))
        return Reply(hamburger_stream([("a", 1), ("b", 1)]))

    server.answer = answer
    assert run_bench(server, "--request-rate", "100", "--requests", "1", "--warm-up", "3") == 0
    assert running == [1, 2, 3, 4]


async def test_clients_have_a_connection_each_and_are_used_again() -> None:
    async with Clients({}) as clients:
        async with clients.one() as one, clients.one() as other:
            assert one is not other
        async with clients.one() as again:
            assert again in (one, other)
    assert one.is_closed
    assert other.is_closed


def test_a_busy_client_says_so(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [Answer(1.0, first=1.1, last=1.2, arrivals=[(1.1, 1)], ended=1.3)]
    for busy, told in ((0.95, True), (0.2, False)):
        file = io.StringIO()
        measured = Measured(Level(1, None, None), answers, summarise(answers), busy)
        print_tables(Console(file=file, width=200), [measured], "a title", seed=1)
        assert ("this client itself computed 95% of the time" in file.getvalue()) == told


def test_closed_loop_keeps_so_many_in_flight(server: ScriptedServer) -> None:
    server.replies = [Reply(hamburger_stream([("a", 2)]), after_requests=4)]
    assert run_bench(server, "--concurrency", "4", "--requests", "4", "--warm-up", "0", "--timeout", "20") == 0


def test_open_loop_sends_every_request_without_waiting_for_answers(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    server.replies = [Reply(hamburger_stream([("a", 2)]), after_requests=8)]
    dataset = tmp_path / "prompts.jsonl"
    dataset.write_text('{"prompt": "eins\u2028zwei"}\n\n{"prompt": "drei", "more": 1}\n', encoding="utf-8")
    options = ("--request-rate", "500", "--requests", "8", "--warm-up", "0", "--dataset", str(dataset), "--ignore-eos")
    assert run_bench(server, *options, "--timeout", "20") == 0
    assert sorted(r["messages"][0]["content"] for r in server.requests) == ["drei"] * 4 + ["eins\u2028zwei"] * 4
    assert all(r["ignore_eos"] is True for r in server.requests)
    assert "500 req/s" in capsys.readouterr().out


async def test_open_loop_waits_until_each_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    delays = []

    async def sleep(seconds: float) -> None:
        delays.append(seconds)

    async def ask(client: httpx.AsyncClient, job: Job, prompt: str) -> Answer:
        return Answer(0.0, finish_reason=prompt)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(load, "ask", ask)
    async with Clients({}) as clients:
        job = Job(model="m", endpoint="chat", output_tokens=1)
        answers = await load.open_loop(clients, job, ["a", "b", "c"], [0.0, 1000.0, 5000.0], lambda: None)
    assert delays == pytest.approx([0, 1000, 5000], abs=60)
    assert [answer.finish_reason for answer in answers] == ["a", "b", "c"]


@pytest.mark.parametrize("count", [b"1e400", b"0", b"[]"])
def test_a_tokenize_that_makes_no_sense_is_no_better_than_none(count: bytes) -> None:
    answer = httpx.Response(200, content=b'{"count": ' + count + b"}")
    with httpx.Client(transport=httpx.MockTransport(lambda request: answer), base_url="http://s") as client:
        assert bench._words_per_token(client, "m") == bench.WORDS_PER_TOKEN


def test_prompts_are_made_as_they_are_taken() -> None:
    assert list(islice(endless_prompts(9, seed=4), 3)) == built_in_prompts(3, 9, seed=4)


@pytest.mark.parametrize("refused", [False, True])
def test_as_many_files_may_be_open_as_the_system_allows(refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    asked = []

    def setrlimit(kind: int, limits: tuple[int, int]) -> None:
        asked.append((kind, limits))
        if refused:
            raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, 4096))
    monkeypatch.setattr(resource, "setrlimit", setrlimit)
    load.allow_many_connections()
    assert asked == [(resource.RLIMIT_NOFILE, (4096, 4096))]


def test_a_platform_without_limits_of_open_files_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resource", None)
    load.allow_many_connections()


def test_macro_steps_and_accepted_drafts_are_told(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.replies = [Reply(drafting_stream())]
    figures = tmp_path / "figures.json"
    assert run_bench(server, "--concurrency", "2", "--requests", "3", "--warm-up", "0", "--json", str(figures)) == 0
    out = capsys.readouterr().out
    assert "tokens/step" in out
    assert "60%" in out
    [level] = json.loads(figures.read_text(encoding="utf-8"))["levels"]
    assert (level["macro_steps"], level["tokens_per_step"], level["tokens_per_kv"]) == (9, 2.0, 1.0)
    assert (level["drafted_tokens"], level["accepted_tokens"], level["acceptance"]) == (15, 9, 0.6)
    assert [level["requests"][0][name] for name in ("macro_steps", "drafted_tokens", "accepted_tokens")] == [3, 5, 3]
