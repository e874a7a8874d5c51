"""Options, files and surroundings of the clients that cannot be used: one line that names them, before anything is
sent."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import sys
from pathlib import Path

import httpx
import pytest

from chat_terminal import run_chat
from hamburger.clients import bench
from hamburger.clients.connection import client_options
from hamburger.clients.output_files import check_apart, check_output
from hamburger.clients.prompts import read_prompts
from hamburger.server.cli import build_parser, main
from scripted_server import Reply, ScriptedServer, hamburger_stream

Captured = pytest.CaptureFixture[str]
ONE_REQUEST = ("--concurrency", "1", "--requests", "1", "--warm-up", "0")


def run_bench(server: ScriptedServer, *arguments: str) -> int:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return bench.run(parser.parse_args(["--url", server.url, *ONE_REQUEST, *arguments]))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (rb'{"prompt": "cut \ud83d"}', r'line 2: "prompt" holds \ud83d, half of a surrogate pair'),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "line 2: its lists or objects are nested too deeply"),
        (b'{"prompt": "gr\xfc\xdfe"}', "cannot be read: line 2 is no UTF-8 text. Copy the file again, or convert it"),
        (b'{"prompt": "open', "line 2: this is no JSON (Unterminated string"),
    ],
    ids=["surrogate", "deep", "latin-1", "no JSON"],
)
def test_a_line_of_a_dataset_that_cannot_be_sent_is_named(
    line: bytes, message: str, server: ScriptedServer, tmp_path: Path, capsys: Captured
) -> None:
    dataset = tmp_path / "prompts.jsonl"
    dataset.write_bytes(b'{"prompt": "a"}\n' + line + b"\n")
    assert run_bench(server, "--dataset", str(dataset)) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {dataset}")
    assert message in err
    assert err.count("\n") == 1
    assert not server.keys
    assert not server.requests


def test_a_dataset_may_be_gzipped_have_a_byte_order_mark_and_odd_texts_that_are_not_sent(tmp_path: Path) -> None:
    rows = b'\xef\xbb\xbf{"prompt": "gr\xc3\xbc\xc3\x9fe", "more": "\\ud83d"}\r\n{"prompt": "\\ud83c\\udf54"}'
    for name, data in (("p.jsonl", rows), ("p.jsonl.gz", gzip.compress(rows, mtime=0))):
        (tmp_path / name).write_bytes(data)
        assert read_prompts(tmp_path / name) == ["gr\u00fc\u00dfe", "\U0001f354"]


@pytest.mark.parametrize("data", [b'{"prompt": "a"}', gzip.compress(b'{"prompt": "a"}\n' * 99, mtime=0)[:-12]])
def test_a_dataset_that_is_no_whole_gzip_file_is_named(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl.gz"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"p\.jsonl\.gz cannot be read: .*Copy the file again"):
        read_prompts(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "\udcff"), "--model: '\\udcff' holds bytes that are no UTF-8 text"),
        (("--api-key", "s\u00e9cret"), "--api-key: the key holds what an HTTP header cannot carry"),
        (("--api-key", "secret\nX-More: 1"), "--api-key: the key holds what"),
        (("--api-key", "secret "), "--api-key: the key holds what"),
        (("--api-key", "secret\udcff"), "--api-key: the key holds what"),
        (("--url", "http://\udcff"), "--url: 'http://\\udcff' holds a space or another character that no URL has"),
        (("--url", "http://name:secret@host"), "--url: a user's name, a password"),
        (("--timeout", "1e11"), "--timeout: '1e11' is too long: write at most 2000000"),
        (("--seed", "-1"), "--seed: '-1' is not a whole number from 0 up"),
        (("--output-tokens", "0"), "--output-tokens: '0' is not a whole number from 1 up"),
        (("--output-tokens", "9" * 5000), "--output-tokens: '999999999999...9999999999999' is not a whole number"),
        (("--confidence", "9" * 5000), "--confidence: '999999999999...9999999999999' is not a number from 0 to 1"),
        (("--requests", "0"), "--requests: '0' is not a whole number from 1 to 100000\n"),
        (("--requests", str(10**20)), "--requests: '100000000000000000000' is not a whole number from 1 to 100000\n"),
        (("--concurrency", "1,99999999"), "--concurrency: '99999999' is not a whole number from 1 to 10000\n"),
        (("--warm-up", str(10**12)), "--warm-up: '1000000000000' is not a whole number from 0 to 100000\n"),
        (
            ("--prompt-tokens", "99999999999"),
            "--prompt-tokens: '99999999999' is not a whole number from 1 to 1000000\n",
        ),
        (("--dataset", ""), "--dataset: '' names no file: write its path"),
        (("--json", ""), "--json: '' names no file: write its path"),
    ],
)
def test_what_cannot_be_sent_is_named_by_its_option(arguments: tuple[str, ...], message: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit) as exit_info:
        run_bench(ScriptedServer(url="http://127.0.0.1:9"), *arguments)
    assert exit_info.value.code == 2
    err = capsys.readouterr().err
    assert f"error: argument {message}" in err
    assert "secret" not in err


@pytest.mark.parametrize(
    ("variable", "proxy", "message"),
    [
        ("http_proxy", "http://x:port", "http_proxy names no proxy (Invalid port: 'port')"),
        ("all_proxy", "gopher://x", "all_proxy names no proxy (Unknown scheme for proxy URL"),
        ("all_proxy", "socks5://x:1080", "all_proxy names a SOCKS proxy: install the package socksio"),
    ],
)
def test_a_proxy_that_is_none_is_named(
    variable: str, proxy: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr("hamburger.clients.connection.find_spec", lambda name: None)
    monkeypatch.setenv(variable, proxy)
    with pytest.raises(ValueError, match=re.escape(message)):
        client_options("http://server.example", None, 5.0)
    assert not client_options("http://127.0.0.1:8000", None, 5.0)["trust_env"]  # there no proxy is asked
    monkeypatch.setenv(variable, "proxy.example:3128")
    with httpx.Client(**client_options("http://server.example", None, 5.0)):
        pass


def test_a_system_message_that_is_no_text_is_named(capsys: Captured) -> None:
    with pytest.raises(SystemExit) as exit_info:
        run_chat(ScriptedServer(url="http://127.0.0.1:9"), "--system", "caf\udce9")
    assert exit_info.value.code == 2
    assert "argument --system: 'caf\\udce9' holds bytes that are no UTF-8 text" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["s\u00e9cret,other", "secret\r\nX-More: 1", "secret\udcff"])
def test_a_key_of_the_environment_that_cannot_be_sent_is_named_unless_another_is_given(
    key: str, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.replies = [Reply(hamburger_stream([("a", 2)]))]
    monkeypatch.setenv("HAMBURGER_API_KEY", key)
    with pytest.raises(ValueError, match=r"^the environment variable HAMBURGER_API_KEY holds what") as told:
        run_bench(server)
    assert "secret" not in str(told.value)
    assert "s\u00e9cret" not in str(told.value)
    assert not server.keys
    assert run_bench(server, "--api-key", "given") == 0
    assert server.keys == ["Bearer given"]


def test_a_place_that_cannot_be_written_is_named_before_the_load(
    server: ScriptedServer, tmp_path: Path, capsys: Captured
) -> None:
    for path, why in ((tmp_path, "Is a directory"), (tmp_path / "no" / "f.json", "No such file or directory")):
        assert run_bench(server, "--json", str(path)) == 2
        assert f"error: --json {path} cannot be written ({why}): name a file" in capsys.readouterr().err
    assert not server.keys
    assert not server.requests


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_line_after_the_figures(server: ScriptedServer, capsys: Captured) -> None:
    server.replies = [Reply(hamburger_stream([("a", 2)]))]
    assert run_bench(server, "--json", "/dev/full") == 2
    printed = capsys.readouterr()
    assert "1 in flight" in printed.out
    assert printed.err.startswith("error: --json /dev/full cannot be written (No space left on device): name a file")
    assert printed.err.count("\n") == 1


def test_a_dataset_that_cannot_be_read_is_named_by_its_option(
    server: ScriptedServer, tmp_path: Path, capsys: Captured
) -> None:
    for path, why in ((tmp_path / "none.jsonl", "No such file or directory"), (tmp_path, "Is a directory")):
        assert run_bench(server, "--dataset", str(path)) == 2
        assert capsys.readouterr().err == (
            f"error: --dataset {path} cannot be read ({why}): name a file that is there and that you may read.\n"
        )
    assert not server.keys


def test_figures_never_replace_the_dataset_that_they_are_of(
    server: ScriptedServer, tmp_path: Path, capsys: Captured
) -> None:
    dataset, link = tmp_path / "p.jsonl", tmp_path / "link.json"
    dataset.write_text('{"prompt": "a"}\n')
    link.symlink_to(dataset)
    assert run_bench(server, "--dataset", str(dataset), "--json", str(link)) == 2
    assert f"error: --dataset and --json are the same file, {dataset}: name another one." in capsys.readouterr().err
    assert dataset.read_text() == '{"prompt": "a"}\n'


def test_one_file_is_known_by_all_its_names_and_a_device_holds_nothing(tmp_path: Path) -> None:
    file, hard, soft, absent = (tmp_path / name for name in ("file", "hard", "soft", "absent"))
    file.touch()
    hard.hardlink_to(file)
    soft.symlink_to(absent)
    for one, other in ((file, hard), (absent, soft), (absent, tmp_path / "." / "absent"), (file, file)):
        with pytest.raises(ValueError, match=r"^--a and --c are the same file, "):
            check_apart({"--a": one, "--b": None, "--c": other})
    check_apart({"--a": file, "--b": absent, "--c": Path("/dev/null"), "--d": Path("/dev/null")})


@pytest.mark.parametrize("error", [KeyboardInterrupt, None])
def test_a_bench_that_measured_nothing_leaves_no_file(
    error: type[BaseException] | None, server: ScriptedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "closed_loop", interrupted)
    figures = tmp_path / "figures.json"
    running = server if error else ScriptedServer(url="http://127.0.0.1:9")
    assert run_bench(running, "--json", str(figures)) == (130 if error else 1)
    assert not figures.exists()


def test_a_look_at_an_output_that_is_not_there_leaves_none_and_keeps_the_link_to_it(tmp_path: Path) -> None:
    absent, link = tmp_path / "absent", tmp_path / "link"
    link.symlink_to(absent)
    check_output("--json", absent)
    check_output("--json", link)
    assert link.is_symlink()
    assert not absent.exists()


def test_an_option_that_a_command_lacks_points_to_the_help_of_that_command(capsys: Captured) -> None:
    for arguments, program in ((["chat", "--nope"], "hamburger chat"), (["--nope", "chat"], "hamburger")):
        with pytest.raises(SystemExit) as exit_info:
            main(arguments)
        assert exit_info.value.code == 2
        assert capsys.readouterr().err == f"hamburger: unrecognized arguments: --nope (see {program} --help)\n"


def test_an_option_that_is_nearly_right_is_told_which_was_meant(capsys: Captured) -> None:
    """vLLM's names, for those who come from there, and slips."""
    for option, meant in (
        ("--max-num-batched-tokens", "--max-num-batched-slots"),
        ("--enable-prefix-caching", "--prefix-cache"),
        ("--settle-windw=5", "--settle-window"),
    ):
        with pytest.raises(SystemExit):
            main(["serve", option])
        assert capsys.readouterr().err.endswith(f", did you mean {meant}? (see hamburger serve --help)\n")


def test_a_file_that_is_not_there_is_named_without_the_number_of_the_error(capsys: Captured, tmp_path: Path) -> None:
    absent = tmp_path / "absent.jsonl"
    assert main(["distill", str(absent), "--out", str(tmp_path / "answers.jsonl")]) == 2
    assert capsys.readouterr().err == f"hamburger: {absent} cannot be used: No such file or directory.\n"


def test_what_is_named_without_an_option_may_stand_behind_one() -> None:
    given = build_parser().parse_args(["inspect", "data", "--html", "page.html", "3"])
    assert (given.folder, given.index, given.html) == (Path("data"), 3, Path("page.html"))


def test_a_look_at_an_output_keeps_what_it_holds_and_opens_no_pipe(tmp_path: Path) -> None:
    kept, pipe = tmp_path / "kept.json", tmp_path / "pipe"
    kept.write_text(json.dumps("earlier"))
    check_output("--json", kept)
    assert kept.read_text() == '"earlier"'
    os.mkfifo(pipe)
    check_output("--json", pipe)  # would wait for a reader


@pytest.mark.parametrize(("name", "remedy"), [("stdin", "pipe them in"), ("stdout", "> /dev/null")])
def test_a_chat_whose_input_or_output_the_shell_closed_says_so(
    name: str, remedy: str, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(sys, name, None)
    assert run_chat(server) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"error: standard {name.removeprefix('std')}put is closed: ")
    assert remedy in err
    assert err.count("\n") == 1
    assert not server.keys
