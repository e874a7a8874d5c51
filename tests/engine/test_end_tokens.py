"""The token that ends a text for a tokenizer's own files, which a model's may not name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hamburger.engine.text.tokenizer_files import with_own_end
from tokenizer_folders import added, copy_builtin


@pytest.mark.parametrize(
    ("config", "beside", "ends"),
    [
        ({"eos_token": "<|im_end|>"}, {}, (0, 2)),  # its id stands in tokenizer.json
        ({"eos_token": {"content": "<|im_end|>", "special": True}}, {}, (0, 2)),
        ({"eos_token": "<|endoftext|>"}, {}, (0,)),
        ({"eos_token": "<new>", "added_tokens_decoder": {"7": added("<new>", True)}}, {}, (0, 7)),
        ({"eos_token": "<new>", "added_tokens_decoder": {"49152": added("<new>", True)}}, {}, (0,)),  # no row has it
        ({"eos_token": "<|im_end|>", "added_tokens_decoder": {"7": added("<new>", True)}}, {}, (0, 2)),
        ({"eos_token": ...}, {"special_tokens_map.json": {"eos_token": "<|im_end|>"}}, (0, 2)),
        ({"eos_token": None}, {"special_tokens_map.json": {"eos_token": "<|im_end|>"}}, (0,)),
        ({"eos_token": "of no vocabulary"}, {}, (0,)),
    ],
)
def test_the_tokenizers_own_end_token_ends_answers_too(
    tmp_path: Path, config: dict[str, Any], beside: dict[str, Any], ends: tuple[int, ...]
) -> None:
    copy_builtin(tmp_path, **{"added_tokens_decoder": ..., **config})
    for name, value in beside.items():
        (tmp_path / name).write_text(json.dumps(value))
    assert with_own_end((0,), 49152, tmp_path) == ends
    assert with_own_end((0,), 49152, tmp_path / "model.gguf") == ends  # the files beside it count


def test_without_files_the_models_end_tokens_stay(tmp_path: Path) -> None:
    assert with_own_end((3, 4), 9, tmp_path / "model.gguf") == (3, 4)
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "a"}')
    assert with_own_end((3, 4), 9, tmp_path) == (3, 4)  # loading it says what is wrong
