"""What a model's files recommend for sampling, as the server and LLM find it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest

from fake_engines import fake_config, fake_core, fake_info
from fakes import EOS, ByteTokenizer, ScriptedRunner
from gguf_files import gguf_file
from hamburger.engine import LLM, SamplingParams
from hamburger.engine.core.sequence import Sequence
from hamburger.engine.sampling_defaults import recommended_defaults
from hamburger.model.checkpoints.load import save_checkpoint
from hamburger.model.checkpoints.sources import BUILTIN, CheckpointError, resolve_source
from hamburger.model.config import ModelConfig
from small_models import graft_config, random_tensors, trunk_config


def folder(path: Path, generation: Any = None) -> Path:
    path.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUILTIN / name, path)
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def gguf_model(path: Path, **recommended: float) -> Path:
    """A file whose header recommends this."""
    with gguf_file(path, "llama", trunk_config()) as writer:
        for name, value in recommended.items():
            kind = gguf.GGUFValueType.INT32 if isinstance(value, int) else gguf.GGUFValueType.FLOAT32
            writer.add_key_value(f"general.sampling.{name}", value, kind)
    return path


def test_a_folders_generation_config_recommends(tmp_path: Path) -> None:
    generation = {
        "do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": None, "repetition_penalty": 1.05,
        "eos_token_id": [2], "max_new_tokens": 100, "transformers_version": "4.51.0",
    }  # fmt: skip
    found = recommended_defaults(resolve_source(str(folder(tmp_path / "m", generation))))
    assert found == {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}
    assert SamplingParams(**found).top_k == 20  # type: ignore[arg-type]


@pytest.mark.parametrize("generation", [None, {}, {"temperature": None}])
def test_who_recommends_nothing_leaves_openais_defaults(tmp_path: Path, generation: Any) -> None:
    assert recommended_defaults(resolve_source(str(folder(tmp_path / "m", generation)))) == {}
    assert recommended_defaults(resolve_source(None)) == {}
    assert recommended_defaults(resolve_source("builtin")) == {}


def test_a_top_k_of_minus_one_is_off(tmp_path: Path) -> None:
    assert recommended_defaults(resolve_source(str(folder(tmp_path / "m", {"top_k": -1})))) == {"top_k": 0}
    assert recommended_defaults(resolve_source(str(folder(tmp_path / "n", {"top_k": 20.0})))) == {"top_k": 20}


@pytest.mark.parametrize(
    ("generation", "told"),
    [
        ({"temperature": "hot"}, "temperature is 'hot': it must be a number"),
        ({"top_p": 0}, r"top_p is 0: it must be in \(0, 1\]"),
        ({"top_k": 2.5}, "top_k is 2.5: it must be a whole number"),
        ({"repetition_penalty": True}, "repetition_penalty is True"),
    ],
)
def test_what_nothing_can_be_sampled_by_is_named(tmp_path: Path, generation: Any, told: str) -> None:
    source = resolve_source(str(folder(tmp_path / "m", generation)))
    with pytest.raises(CheckpointError, match=rf"m/generation_config\.json: {told}.*--sampling-defaults openai"):
        recommended_defaults(source)


def test_a_gguf_file_recommends_unless_a_generation_config_lies_beside_it(tmp_path: Path) -> None:
    file = gguf_model(tmp_path / "m.gguf", temp=0.95, top_k=40, min_p=0.05, penalty_repeat=1.1, mirostat=2)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUILTIN / name, tmp_path)
    source = resolve_source(str(file))
    assert recommended_defaults(source) == {"temperature": 0.95, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1}
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.3}')
    assert recommended_defaults(source) == {"temperature": 0.3}


def test_a_base_recommends_where_its_hamburger_does_not(tmp_path: Path) -> None:
    base, burger = folder(tmp_path / "base", {"temperature": 0.4}), tmp_path / "burger"
    burger.mkdir()
    (burger / "config.json").write_text(json.dumps({"model_type": "hamburger", "base": "base"}))
    source = resolve_source(str(burger), str(base))
    assert recommended_defaults(source) == {"temperature": 0.4}
    (burger / "generation_config.json").write_text('{"top_p": 0.5}')
    assert recommended_defaults(source) == {"top_p": 0.5}


class Asked(ScriptedRunner):
    """What sequences are sampled by."""

    def __init__(self) -> None:
        super().__init__({"0": [[EOS]]})
        self.params: list[SamplingParams] = []

    def script(self, sequence: Sequence) -> list[int]:
        self.params.append(sequence.params)
        return super().script(sequence)


def test_llm_samples_by_it_unless_told_otherwise() -> None:
    runner, config = Asked(), fake_config()
    llm = LLM.from_core(fake_core(runner, config), fake_info(config), ByteTokenizer(), {"temperature": 0.5, "top_k": 3})
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.5, top_k=3)
    llm.generate("a", progress=False)
    llm.generate("a", SamplingParams(top_p=0.5), progress=False)
    assert [(p.temperature, p.top_k, p.top_p) for p in runner.params] == [(0.5, 3, 1), (1, 0, 0.5)]


def test_llm_of_a_folder_knows_what_it_recommends(tmp_path: Path) -> None:
    config = ModelConfig(trunk=trunk_config(vocab_size=49152, eos_token_ids=(0,)), graft=graft_config())
    save_checkpoint(tmp_path, config, random_tensors(config, seed=1))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUILTIN / name, tmp_path)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.25}')
    llm = LLM(str(tmp_path), device="cpu", kv_cache_memory=2**20, max_num_seqs=2)
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.25)
    assert llm.info.eos_token_ids == [0, 2]  # the tokenizer's own, too
