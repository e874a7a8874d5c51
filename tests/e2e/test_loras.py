"""LoRA adapters on a real server: all at once, answers are those of the models that PEFT merges them into."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from checkpoints import save_hf
from hamburger.engine import LLM, SamplingParams
from hamburger.engine.types.errors import InvalidRequest
from hamburger.model.config import ModelConfig
from lora_folders import lora_folder, merged_peer, peft_folder
from peer import hugging_face, is_greedy
from real_server import RealServer
from small_models import random_tensors, trunk_config

CONFIG = ModelConfig(trunk=trunk_config(vocab_size=49152, eos_token_ids=(2,)))
BUILTIN = Path(__file__).parent.parent.parent / "model" / "builtin"
OPTIONS = ("--dtype", "float32", "--kv-cache-memory", "64MiB")


@dataclass
class Trained:
    """A plain model's folder with three adapters beside it, and the peer that each name's answers are those of."""

    model: Path
    adapters: dict[str, Path]
    peers: dict[str, Any]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    root, tensors = tmp_path_factory.mktemp("loras"), random_tensors(CONFIG, seed=4)
    model = save_hf(root / "model", CONFIG, tensors)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUILTIN / name, model / name)
    fields: dict[str, dict[str, Any]] = {
        "sql": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"},
        "law": {"r": 8, "target_modules": ["q_proj", "v_proj"], "use_rslora": True},
        "late": {"r": 2, "lora_alpha": 4, "target_modules": ["down_proj", "o_proj"]},
    }
    adapters = {
        name: peft_folder(root / name, CONFIG, tensors, seed, **of) for seed, (name, of) in enumerate(fields.items())
    }
    peers = {name: merged_peer(folder, CONFIG, tensors) for name, folder in adapters.items()}
    return Trained(model, adapters, peers | {"base": hugging_face(CONFIG, tensors)})


@pytest.fixture(scope="module")
def server(trained: Trained) -> Iterator[RealServer]:
    named = "; ".join(f"{name}={trained.adapters[name]}" for name in ("sql", "law"))
    options = (*OPTIONS, "--served-model-name", "base", "--max-loras", "3", "--allow-lora-loading", "true")
    with RealServer(str(trained.model), *options, env={"HAMBURGER_LORA": named}) as running:
        yield running


async def test_all_at_once_each_request_is_answered_by_who_it_names(trained: Trained, server: RealServer) -> None:
    assert "LoRA adapters: sql, law" in server.log()
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:

        async def ask(model: str, prompt: list[int], stream: bool) -> tuple[str, list[int], list[int]]:
            fields = {"max_tokens": 24, "temperature": 0, "extra_body": {"return_token_ids": True, "ignore_eos": True}}
            if not stream:
                whole = await client.completions.create(model=model, prompt=prompt, **fields)  # type: ignore[call-overload]
                return model, prompt, whole.choices[0].token_ids
            found: list[int] = []
            async for chunk in await client.completions.create(model=model, prompt=prompt, stream=True, **fields):  # type: ignore[call-overload]
                found += [token for choice in chunk.choices for token in getattr(choice, "token_ids", None) or ()]
            return model, prompt, found

        async def ask_all(names: list[str]) -> None:
            prompts = [[7 + i, 900, 35, 7 + i, 900, 35] * (1 + 8 * i) for i in range(3)]
            asked = [ask(name, prompt, stream) for prompt in prompts for name in names for stream in (False, True)]
            answers = await asyncio.gather(*asked)
            for name, prompt, answer in answers:
                assert len(answer) == 24
                assert is_greedy(trained.peers[name], prompt, answer), name
            assert len({tuple(answer) for _, prompt, answer in answers if prompt == prompts[0]}) > 1

        await ask_all(["base", "sql", "law"])
        async with httpx.AsyncClient(base_url=server.url) as http:
            given = {"lora_name": "late", "lora_path": str(trained.adapters["late"])}
            assert (await http.post("/v1/load_lora_adapter", json=given)).status_code == 200
            assert [model.id async for model in client.models.list()] == ["base", "sql", "law", "late"]
            await ask_all(["late", "base", "sql", "law"])
            assert (await http.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})).status_code == 200
            assert [model.id async for model in client.models.list()] == ["base", "law", "late"]
            given = {"lora_name": "sql", "lora_path": str(trained.model)}
            refused = await http.post("/v1/load_lora_adapter", json=given)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_path")
            assert "adapter_config.json is missing" in refused.json()["error"]["message"]
        await ask_all(["base", "law", "late"])
    server.wait_idle()


def test_an_adapter_that_cannot_be_served_ends_the_start(trained: Trained, tmp_path: Path) -> None:
    folder = lora_folder(tmp_path / "dora", CONFIG, 1, use_dora=True)
    command = [str(Path(sys.executable).parent / "hamburger"), "serve", str(trained.model), *OPTIONS, "--port", "0"]
    done = subprocess.run([*command, "--lora", f"x={folder}"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert f"lora x: {folder / 'adapter_config.json'}: use_dora is True, which is not served" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout


def test_offline_they_are_named_per_call(trained: Trained) -> None:
    llm = LLM(str(trained.model), dtype="float32", kv_cache_memory=64 << 20, max_loras=1)
    llm.load_lora("sql", trained.adapters["sql"])
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    for name in ("sql", None):
        [result] = llm.generate([[5, 6, 7]], sampling, progress=False, lora=name)
        assert is_greedy(trained.peers[name or "base"], [5, 6, 7], result.token_ids)
    wrong: Any
    for wrong in (5, ["x"]):
        with pytest.raises(InvalidRequest, match="name is"):
            llm.load_lora(wrong, trained.adapters["sql"])
        with pytest.raises(InvalidRequest, match="is not loaded"):
            llm.generate([[5, 6, 7]], sampling, progress=False, lora=wrong)
        with pytest.raises(InvalidRequest, match="path is"):
            llm.load_lora("law", wrong)
    with pytest.raises(InvalidRequest, match="and not empty"):
        llm.load_lora("", trained.adapters["sql"])
    with pytest.raises(InvalidRequest, match="is loaded already"):
        llm.load_lora("sql", trained.adapters["sql"])
    with pytest.raises(InvalidRequest, match="max_loras is 1"):
        llm.load_lora("law", trained.adapters["law"])
    llm.unload_lora("sql")
    with pytest.raises(InvalidRequest, match="'sql' is not loaded"):
        llm.generate([[5, 6, 7]], sampling, progress=False, lora="sql")
    llm.load_lora("law", trained.adapters["law"])
