"""Which prompts a model is evaluated on."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hamburger.training.corpus.prompts import Message, is_held_out
from hamburger.training.errors import TrainingError
from hamburger.training.quality.prompts import DEFAULT_KINDS, Prompt, choose_prompts, read_kinds


def encode(messages: Sequence[Message]) -> list[int]:
    return list("|".join(message["content"] for message in messages).encode())


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def rows(source: str, number: int, **more: Any) -> list[dict[str, Any]]:
    return [{"id": f"{source}-{i}", "source": source, "prompt": f"{source} {i}", **more} for i in range(number)]


def choose(
    files: list[Path], kinds: dict[str, list[str]] | None, per_kind: int, held_out: float = 1.0, longest: int = 100
) -> list[Prompt]:
    return choose_prompts(files, kinds, per_kind, held_out, encode, longest)


def test_only_held_out_prompts_are_chosen_and_more_keeps_fewer(tmp_path: Path) -> None:
    file = write(tmp_path / "p.jsonl.gz", rows("a", 300))
    small, large = (choose([file], {"k": ["a"]}, n, held_out=0.2) for n in (10, 30))
    assert all(is_held_out(prompt.id, 0.2) for prompt in large)
    assert large[:10] == small
    assert small[0].prompt_ids == list(small[0].id.replace("-", " ").encode())
    assert [p.id for p in small] != sorted((p.id for p in small), key=lambda i: int(i[2:]))  # not the file's order
    assert choose([write(tmp_path / "r.jsonl", rows("a", 300)[::-1])], {"k": ["a"]}, 10, held_out=0.2) == small


def test_kinds_go_by_source_category_or_file(tmp_path: Path) -> None:
    files = [
        write(tmp_path / "mixed.jsonl", [*rows("tales", 2, category="qa"), *rows("tales2", 2, category="story")]),
        write(tmp_path / "plain.jsonl.gz", [{"id": f"x{i}", "prompt": f"p{i}"} for i in range(2)]),
    ]
    kinds = {"QA": ["tales*:qa"], "story": ["tales*"], "file": ["plain"]}
    chosen = choose(files, kinds, 2)
    assert [(p.kind, p.id[:6]) for p in chosen] == [
        *[("QA", "tales-")] * 2,
        *[("story", "tales2")] * 2,
        *[("file", p.id) for p in chosen[4:]],
    ]
    assert {p.id for p in chosen[4:]} == {"x0", "x1"}


def test_conversations_and_long_prompts(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    found = write(tmp_path / "p.jsonl", [{"id": "chat", "messages": turns}, {"id": "long", "prompt": "x" * 101}])
    [prompt] = choose([found], {"k": ["p"]}, 1)
    assert (prompt.id, bytes(prompt.prompt_ids)) == ("chat", b"a|b|c")
    with pytest.raises(TrainingError, match="kind 'k' has 1 held-out prompts of at most 100 tokens, but per_kind is 2"):
        choose([found], {"k": ["p"]}, 2)


def test_an_id_that_is_there_twice_is_named(tmp_path: Path) -> None:
    files = [write(tmp_path / name, rows("a", 1)) for name in ("p.jsonl", "q.jsonl")]
    with pytest.raises(TrainingError, match=r'q.jsonl, line 1: the id "a-0" is that of .*p.jsonl, line 1 too'):
        choose(files, {"k": ["a"]}, 1)
    assert len(choose(files[:1], {"k": ["a"]}, 1)) == 1


def test_default_kinds_know_their_sources(tmp_path: Path) -> None:
    assert read_kinds(None) is DEFAULT_KINDS
    qa = {"category": "context_qa"}
    found = [*rows("gsm8k_train", 1), *rows("mbpp", 1), *rows("oasst1_val", 1), *rows("scitldr_a", 1)]
    found += [*rows("fairytaleqa_train", 1, **qa), *rows("nq_open_dev", 1), *rows("arena_hard_v2", 1)]
    story = {"id": "story", "source": "fairytaleqa_train", "category": "story_continuation", "prompt": "go on"}
    file = write(tmp_path / "all.jsonl", [*found, story])
    chosen = choose_prompts([file], DEFAULT_KINDS, 1, 1.0, encode, 100)
    assert [(p.kind, p.id) for p in chosen] == [
        ("maths", "gsm8k_train-0"),
        ("code", "mbpp-0"),
        ("chat", "oasst1_val-0"),
        ("summaries", "scitldr_a-0"),
        ("context QA", "fairytaleqa_train-0"),
    ]


def test_files_of_ones_own_have_the_kinds_that_they_name(tmp_path: Path) -> None:
    """Category, else source, else file; in an order that is not the files'."""
    files = [
        write(tmp_path / "p.jsonl", [*rows("b", 3, category="sums"), *rows("a", 2), *rows("c", 2, category="")]),
        write(tmp_path / "faq.jsonl.gz", [{"id": f"x{i}", "prompt": f"p{i}", "source": None} for i in range(2)]),
    ]
    chosen = choose(files, None, 2)
    assert [p.kind for p in chosen] == ["a", "a", "c", "c", "faq", "faq", "sums", "sums"]
    assert choose(files[::-1], None, 2) == chosen
    # A kind that nothing was held out of is none.
    some = [prompt for prompt in rows("d", 9) if not is_held_out(prompt["id"], 0.5)]
    held = [prompt for prompt in rows("e", 9) if is_held_out(prompt["id"], 0.5)]
    assert {p.kind for p in choose([write(tmp_path / "q.jsonl", [*some, *held])], None, 1, held_out=0.5)} == {"e"}


def test_one_row_of_our_own_sources_asks_for_our_kinds(tmp_path: Path) -> None:
    """Held out or not."""
    one = next(row for row in rows("mbpp", 9) if not is_held_out(row["id"], 0.5))
    file = write(tmp_path / "p.jsonl", [one, *rows("own", 9, category="sums")])
    with pytest.raises(TrainingError, match="kind 'maths' has 0 held-out prompts"):
        choose([file], None, 1, held_out=0.5)


def test_too_few_prompts_name_the_options_and_what_there_is(tmp_path: Path) -> None:
    file = write(tmp_path / "p.jsonl", [*rows("a", 3), *rows("b", 2)])
    named = (
        r"lower it \(--per-kind N\), give more files \(--prompts\), .*--kinds FILE.*Held out are 3 of 'a', 2 of 'b'\."
    )
    with pytest.raises(TrainingError, match=f"kind 'b' has 2 .* but per_kind is 3: {named}"):
        choose([file], None, 3)
    many = write(tmp_path / "many.jsonl", [row for i in range(30) for row in rows(f"s{i:02}", 1)])
    with pytest.raises(TrainingError, match=r"1 of 's09', and more in 20 other kinds\.$"):
        choose([many], None, 2)
    with pytest.raises(TrainingError, match=r"none of the 5 prompts in .*p\.jsonl is held out, by --held-out 0: give"):
        choose([file], None, 1, held_out=0)
    with pytest.raises(TrainingError, match=r"line 1: its category or source has half of a surrogate pair"):
        choose([write(tmp_path / "s.jsonl", rows("x", 1, category="\ud800"))], None, 1)


def test_kinds_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "kinds.yaml"
    file.write_text("maths: [gsm8k_train]\n1: ['a*', 'b:c']\n")
    assert read_kinds(file) == {"maths": ("gsm8k_train",), "1": ("a*", "b:c")}
    for text, problem in (("[a]", "must map"), ("", "must map"), ("a: b", "a must be a list"), ("a: [1]", "a must be")):
        file.write_text(text)
        with pytest.raises(TrainingError, match=problem):
            read_kinds(file)
    file.write_text("a: [")
    with pytest.raises(TrainingError, match="cannot be read as YAML"):
        read_kinds(file)
    with pytest.raises(FileNotFoundError):
        read_kinds(tmp_path / "none.yaml")
