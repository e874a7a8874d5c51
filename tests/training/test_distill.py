"""Distilling on a scripted engine: what is written, and what a killed run leaves and finds."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from fake_engines import fake_config, fake_core, fake_info
from fakes import EOS, ByteTokenizer, ScriptedRunner
from hamburger.engine.llm import LLM
from hamburger.training.corpus.prompts import Prompt, is_held_out
from hamburger.training.corpus.repetition import is_repetitive
from hamburger.training.errors import TrainingError
from hamburger.training.prepare.distill import DistillSettings, Tally, answer_seed, distill

ALL = DistillSettings(held_out=0.0, max_tokens=30)


def writer(runner: ScriptedRunner | None = None, **info: Any) -> LLM:
    config = fake_config(max_group=1, max_model_len=64)
    runner = runner or ScriptedRunner(max_group=1)
    return LLM.from_core(fake_core(runner, config), fake_info(config, **info), ByteTokenizer())


def prompts(number: int) -> list[Prompt]:
    return [Prompt(f"p{i}", [{"role": "user", "content": str(i)}], None) for i in range(number)]


def write(out: Path, number: int, settings: DistillSettings = ALL, llm: LLM | None = None) -> Tally:
    return distill(llm or writer(), prompts(number), out, settings, model_name="tiny")


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def by_key(path: Path) -> dict[tuple[str, int], dict[str, Any]]:
    found = {(row["id"], row["sample"]): row for row in rows(path)}
    assert len(found) == len(rows(path))
    return found


def test_an_answer_holds_all_that_training_needs(tmp_path: Path) -> None:
    runner = ScriptedRunner({"0": [[104], [105], [EOS]]}, max_group=1)
    prompt = Prompt("p", [{"role": "user", "content": "x"}], "chat")
    settings = DistillSettings(held_out=0.0, greedy_share=1.0, max_tokens=30, seed=5)
    tally = distill(writer(runner), [prompt], tmp_path / "a.jsonl", settings, model_name="tiny")
    [row] = rows(tmp_path / "a.jsonl")
    assert row == {
        "id": "p",
        "sample": 0,
        "category": "chat",
        "sampling": {"temperature": 0.0, "top_p": 1.0, "max_tokens": 30, "seed": answer_seed(5, "p", 0)},
        "model": "tiny",
        "dtype": "float32",
        "messages": prompt.messages,
        "prompt_ids": list(b"user: x\nassistant: "),
        "response": "hi",
        "token_ids": [104, 105, EOS],
        "finish_reason": "stop",
    }
    assert (tally.kept, tally.num_tokens, tally.cut_off) == (1, 3, 0)


def test_answers_cut_at_max_tokens_are_kept_and_marked(tmp_path: Path) -> None:
    runner = ScriptedRunner({str(i): [[c] for c in range(97, 120)] for i in range(3)}, max_group=1)
    tally = write(tmp_path / "a.jsonl", 3, DistillSettings(held_out=0.0, max_tokens=5), writer(runner))
    assert [(row["finish_reason"], len(row["token_ids"])) for row in rows(tmp_path / "a.jsonl")] == [("length", 5)] * 3
    assert (tally.kept, tally.cut_off) == (3, 3)
    assert "3 were cut off" in tally.lines()[0]


def test_the_share_of_greedy_answers() -> None:
    for share, samples in ((0.5, 1), (0.25, 2), (1.0, 3), (0.0, 1)):
        settings = DistillSettings(greedy_share=share, samples=samples, temperature=0.7, top_p=0.9)
        drawn = [[settings.sampling(f"p{i}", s) for s in range(samples)] for i in range(2000)]
        greedy = [sum(params.is_greedy for params in one) for one in drawn]
        assert max(greedy) <= 1  # a second greedy answer would be the same
        assert sum(greedy) == pytest.approx(2000 * min(1, share * samples), abs=80)
        sampled = [params for one in drawn for params in one if not params.is_greedy]
        assert all((params.temperature, params.top_p) == (0.7, 0.9) for params in sampled)


@given(st.integers(0, 2**40), st.text(), st.integers(0, 9))
def test_seeds_are_valid_and_their_own(seed: int, id: str, sample: int) -> None:
    assert 0 <= answer_seed(seed, id, sample) < 2**60
    assert answer_seed(seed, id, sample) != answer_seed(seed, id, sample + 1)
    assert answer_seed(seed, id, sample) != answer_seed(seed + 1, id, sample)


def test_an_answer_depends_on_its_own_prompt_only(tmp_path: Path) -> None:
    write(tmp_path / "all.jsonl", 20, DistillSettings(held_out=0.0, max_tokens=30, samples=2))
    write(tmp_path / "few.jsonl", 5)
    everything, few = by_key(tmp_path / "all.jsonl"), by_key(tmp_path / "few.jsonl")
    same = [key for key in few if few[key]["sampling"] == everything[key]["sampling"]]
    assert len(same) >= 2
    assert all(few[key] == everything[key] for key in same)


@settings(max_examples=25)
@given(st.data())
def test_a_killed_run_goes_on_where_it_was(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("distill")
    write(folder / "whole.jsonl", 12)
    write(folder / "a.jsonl", 12)
    written = (folder / "a.jsonl").read_bytes()
    cut = data.draw(st.integers(0, len(written)))
    (folder / "a.jsonl").write_bytes(written[:cut])
    tally = write(folder / "a.jsonl", 12)
    assert by_key(folder / "a.jsonl") == by_key(folder / "whole.jsonl")
    assert (tally.found, tally.kept) == (written[:cut].count(b"\n"), 12 - written[:cut].count(b"\n"))
    assert (folder / "a.jsonl").read_bytes().startswith(written[: written[:cut].rfind(b"\n") + 1])


def test_every_answer_is_on_disk_when_the_engine_dies(tmp_path: Path) -> None:
    runner = ScriptedRunner({str(i): [[97]] * i + [[EOS]] for i in range(4)}, max_group=1, fail_at_step=3)
    with pytest.raises(RuntimeError, match="scripted failure"):
        write(tmp_path / "a.jsonl", 4, ALL, writer(runner))
    assert [len(row["token_ids"]) for row in rows(tmp_path / "a.jsonl")] == [1, 2]


def test_looping_answers_are_dropped_once_and_for_all(tmp_path: Path) -> None:
    circle = [[c] for c in b"abcdefgh" * 6]
    runner = ScriptedRunner({"0": circle, "1": [[98], [EOS]], "2": circle}, max_group=1)
    long = DistillSettings(held_out=0.0, max_tokens=40)
    tally = write(tmp_path / "a.jsonl", 3, long, writer(runner))
    assert [row["token_ids"] for row in rows(tmp_path / "a.jsonl")] == [[98, EOS]]
    assert (tally.kept, tally.repetitive) == (1, 2)
    again = write(tmp_path / "a.jsonl", 3, long, writer(ScriptedRunner(fail_at_step=1)))
    assert (again.kept, again.repetitive, again.found, again.num_tokens) == (0, 2, 1, 0)
    assert again.lines()[1:] == ["1 were there already.", "2 went round in circles and were dropped."]
    kept = write(tmp_path / "b.jsonl", 3, DistillSettings(held_out=0.0, max_tokens=40, keep_loops=True), writer(runner))
    assert (kept.kept, kept.repetitive) == (3, 0)
    assert sum(is_repetitive(row["token_ids"]) for row in rows(tmp_path / "b.jsonl")) == 2
    keeping = DistillSettings(held_out=0.0, max_tokens=40, keep_loops=True)
    with pytest.raises(TrainingError, match=r"a\.jsonl\.dropped names 2 answers that were dropped, which --keep-loops"):
        write(tmp_path / "a.jsonl", 3, keeping, writer(runner))


def test_held_out_and_long_prompts_are_left_out_and_counted(tmp_path: Path) -> None:
    many = prompts(60)
    long = Prompt("long", [{"role": "user", "content": "x" * 40}], None)
    settings = DistillSettings(held_out=0.3, max_tokens=30)
    assert not is_held_out("long", 0.3)
    tally = distill(writer(), [long, *many], tmp_path / "a.jsonl", settings, model_name="tiny")
    held_out = {prompt.id for prompt in many if is_held_out(prompt.id, 0.3)}
    assert {row["id"] for row in rows(tmp_path / "a.jsonl")} == {prompt.id for prompt in many} - held_out
    assert (tally.held_out, tally.too_long) == (len(held_out), 1)
    assert any("1 prompts leave no room" in line for line in tally.lines())


def test_nothing_to_write_is_a_mistake_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(
        TrainingError, match=r"none of the 3 prompts .* room for an answer of 60 tokens .* of 64, .* --max-tokens"
    ):
        write(tmp_path / "a.jsonl", 3, DistillSettings(held_out=0.0, max_tokens=60))
    with pytest.raises(TrainingError, match=r"all 3 prompts are held out .* lower --held-out"):
        write(tmp_path / "a.jsonl", 3, DistillSettings(held_out=1.0, max_tokens=30))
    assert not list(tmp_path.iterdir())


def test_a_limit_counts_answers_and_can_be_raised(tmp_path: Path) -> None:
    for limit in (3, 7):
        write(tmp_path / "a.jsonl", 10, DistillSettings(held_out=0.0, max_tokens=30, samples=2, limit=limit))
        assert len(by_key(tmp_path / "a.jsonl")) == limit


def test_other_options_need_another_file(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", 3)
    before = (tmp_path / "a.jsonl").read_bytes()
    for changed in (DistillSettings(held_out=0.0, max_tokens=31), DistillSettings(held_out=0.0, max_tokens=30, seed=1)):
        with pytest.raises(TrainingError, match=r"line 1 was made with other options .* --out"):
            write(tmp_path / "a.jsonl", 3, changed)
    with pytest.raises(TrainingError, match=r"'model': 'tiny'.*'model': 'other'"):
        distill(writer(), prompts(3), tmp_path / "a.jsonl", ALL, model_name="other")
    in_bfloat16 = writer(dtype="bfloat16")
    with pytest.raises(TrainingError, match=r"'dtype': 'float32'.*'dtype': 'bfloat16'"):
        distill(in_bfloat16, prompts(3), tmp_path / "a.jsonl", ALL, model_name="tiny")
    assert (tmp_path / "a.jsonl").read_bytes() == before


def test_another_model_of_the_same_name_needs_another_file(tmp_path: Path) -> None:
    def of(weights: str, number: int) -> Tally:
        return distill(writer(), prompts(number), out, ALL, model_name="tiny", weights=weights)

    out = tmp_path / "a.jsonl"
    write(out, 1)  # an older file does not say
    assert of("0a", 3).kept == 2
    with pytest.raises(TrainingError, match=r"line 2 was made with other options .*'weights': '0a'.*'weights': '0b'"):
        of("0b", 4)
    assert of("0a", 4).kept == 1


def test_an_id_that_was_another_prompt_s_is_named(tmp_path: Path) -> None:
    def asks(*texts: str) -> list[Prompt]:
        return [Prompt(f"line-{i}", [{"role": "user", "content": text}], None) for i, text in enumerate(texts, 1)]

    out = tmp_path / "a.jsonl"
    distill(writer(), asks("a", "b"), out, ALL, model_name="tiny")
    assert distill(writer(), asks("a", "b", "c"), out, ALL, model_name="tiny").kept == 1
    assert distill(writer(), asks("a"), out, ALL, model_name="tiny").found == 3
    before = out.read_bytes()
    with pytest.raises(TrainingError, match=r'answers another prompt than the one that has the id "line-\d" now'):
        distill(writer(), asks("new", "a", "b"), out, ALL, model_name="tiny")
    assert out.read_bytes() == before


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "mine"}\n')
    with pytest.raises(TrainingError, match="was not written by distill"):
        write(tmp_path / "a.jsonl", 3)
    for name in ("settings.json", "c.jsonl", "c.jsonl.dropped"):
        text = '{"my": "settings"}' if name == "settings.json" else '{"text": "mine"}\n{"text": "yours"}'
        (tmp_path / name).write_text(text)
        with pytest.raises(TrainingError, match="was not written by distill"):
            write(tmp_path / name.removesuffix(".dropped"), 1)
        assert (tmp_path / name).read_text() == text
        (tmp_path / name).unlink()
    write(tmp_path / "b.jsonl", 1)
    (tmp_path / "b.jsonl").write_text((tmp_path / "b.jsonl").read_text() * 2)
    with pytest.raises(TrainingError, match='holds the answer to "p0" twice'):
        write(tmp_path / "b.jsonl", 1)


def test_a_hamburger_is_no_base(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="tiny is a HAMburger"):
        write(tmp_path / "a.jsonl", 1, ALL, writer(is_plain_base=False))
    assert not (tmp_path / "a.jsonl").exists()


def test_progress_shows_answers_and_speed(tmp_path: Path) -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=120)
    distill(writer(), prompts(3), tmp_path / "a.jsonl", ALL, model_name="tiny", console=console)
    assert "3/3" in text.getvalue()
    assert "tokens/s" in text.getvalue()
