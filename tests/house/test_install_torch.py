"""deploy/install_torch.py: which build it asks pip for, and what it says when that build is not on offer."""

from pathlib import Path

import pytest

import install_torch

ADDRESS = "https://wheels.example/cpu"


@pytest.mark.parametrize(
    ("env", "gpu", "cuda"),
    [
        ({}, False, False),
        ({}, True, True),
        ({"TORCH_CUDA": "1"}, False, True),
        ({"TORCH_CUDA": "0"}, True, False),
        ({"TORCH_INDEX": ADDRESS}, True, None),
        ({"TORCH_INDEX": ADDRESS}, False, None),
        ({"TORCH_INDEX": ADDRESS, "TORCH_CUDA": "0"}, True, False),
        ({"TORCH_INDEX": "", "TORCH_CUDA": ""}, False, False),
    ],
)
def test_build_follows_the_variables_then_the_machine(env: dict[str, str], gpu: bool, cuda: bool | None) -> None:
    assert install_torch.wants_cuda(env, lambda: gpu) is cuda


def test_a_meaningless_choice_is_named() -> None:
    with pytest.raises(install_torch.SettingError, match="TORCH_CUDA is 'yes'"):
        install_torch.wants_cuda({"TORCH_CUDA": "yes"}, lambda: False)


def test_only_the_unwanted_build_is_excluded() -> None:
    assert "triton<0" in install_torch.constraints(False)
    assert install_torch.constraints(True) == ("torch!=2.13.0+cpu",)
    assert install_torch.constraints(None) == ()


def test_a_named_index_gives_torch_and_the_usual_one_may_give_the_rest() -> None:
    first, second = install_torch.pip_arguments(ADDRESS, ["pins.txt"])
    assert first == ["install", "--constraint", "pins.txt", "--index-url", ADDRESS, "--no-deps", "torch==2.13.0"]
    assert second == ["install", "--constraint", "pins.txt", "--extra-index-url", ADDRESS, "torch==2.13.0"]
    assert install_torch.pip_arguments(None, ["a", "b"]) == [
        ["install", "--constraint", "a", "--constraint", "b", "torch==2.13.0"]
    ]


@pytest.mark.parametrize(
    ("cuda", "log", "message"),
    [
        (False, "No matching distribution found for cuda-toolkit[cublas]==13.0.3", install_torch.ONLY_CUDA),
        (False, "torch 2.13.0 depends on triton==3.7.1", install_torch.ONLY_CUDA),
        (False, "torch 2.6.0 depends on nvidia-cudnn-cu12==9.1.0.70", install_torch.ONLY_CUDA),
        (False, "Could not fetch URL: connection refused", None),
        (True, "Found link file:///wheels/torch-2.13.0%2Bcpu-cp311.whl", install_torch.ONLY_CPU),
        (True, "Could not fetch URL: connection refused", None),
        (None, "torch 2.13.0 depends on triton==3.7.1", None),
    ],
)
def test_a_failure_is_explained_only_where_the_cause_is_known(cuda: bool | None, log: str, message: str | None) -> None:
    assert install_torch.explain(cuda, log) is message


def test_messages_name_the_way_out() -> None:
    assert "TORCH_INDEX=" in install_torch.ONLY_CUDA
    assert "TORCH_CUDA=1" in install_torch.ONLY_CUDA
    assert "TORCH_CUDA=0" in install_torch.ONLY_CPU


def test_nothing_is_asked_of_pip_when_torch_is_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(install_torch, "installed_version", lambda: "2.13.0+cpu")
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("ran a command"))
    assert install_torch.main({}, tmp_path) == 0
    assert "2.13.0+cpu" in capsys.readouterr().out
