"""The process that answers HTTP loads no torch: seen in a fresh interpreter, not only in the import graph."""

import json
import subprocess
import sys

import pytest


def loaded_after(statement: str) -> set[str]:
    code = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    modules: list[str] = json.loads(result.stdout)
    return set(modules)


@pytest.mark.parametrize(
    "module",
    [
        "hamburger.server.app",
        "hamburger.server.cli",
        "hamburger.server.config",
        "hamburger.server.replicas.ray_app",
        "hamburger.engine.async_engine",
        "hamburger.engine.text.tokenizer",
        "hamburger.clients.chat.command",
        "hamburger.clients.bench",
    ],
)
def test_the_http_side_loads_no_torch(module: str) -> None:
    modules = loaded_after(f"import {module}")
    assert module in modules
    assert not modules & {"torch", "transformers"}


def test_the_engine_package_loads_torch_only_for_llm() -> None:
    assert "torch" not in loaded_after("from hamburger.engine import SamplingParams")


def test_the_check_sees_torch_where_it_is() -> None:
    assert "torch" in loaded_after("import hamburger.model.modules.trunk")


def test_a_command_loads_only_what_it_needs() -> None:
    """numpy is what the evaluation commands bring along: 0.1 s of every start, were it loaded for `serve`."""
    code = (
        "import sys; from hamburger.server.cli import build_parser; build_parser().parse_args(['serve']);"
        "print([n for n in sys.modules if n.startswith(('hamburger.clients', 'hamburger.training', 'numpy'))])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"
