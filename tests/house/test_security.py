"""docs/security.md names tests and settings that exist, and the code keeps what it says about code in models."""

import ast
import re
from pathlib import Path

from hamburger.server.config import ServeSettings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text()
ROOMS = ("server", "engine", "model", "clients", "training", "deploy", "benchmarks")
# Modules that turn bytes into code or objects of any class.
FORBIDDEN = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def test_every_limit_is_proven_by_a_test_that_exists() -> None:
    section = PAGE.split("## What a client controls")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 25
    for row in rows:
        assert re.search(r"`tests/[^`]+`\s*\|$", row), row
    for path, _, name in re.findall(r"`(tests/[\w/]+\.py)(::(\w+))?`", PAGE):
        text = (ROOT / path).read_text()
        assert not name or re.search(rf"^(async )?def {name}\(", text, flags=re.MULTILINE), f"{path}::{name}"


def test_settings_on_the_page_exist() -> None:
    section = PAGE.split("## What a client controls")[1].split("\n## ")[0]
    named = {cell for row in section.splitlines()[4:] for cell in re.findall(r"^\|[^|]*\|[^|]*\| `(\w+)` \|", row)}
    assert len(named) > 7
    assert named <= set(ServeSettings.model_fields)


def test_nothing_is_unpickled_and_no_code_is_loaded() -> None:
    loads = 0
    for path in (file for room in ROOMS for file in sorted((ROOT / room).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert not {alias.name.split(".")[0] for alias in node.names} & FORBIDDEN, path
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN:
                assert [alias.name for alias in node.names] == ["UnpicklingError"], path
            if isinstance(node, ast.keyword):
                assert node.arg not in ("trust_remote_code", "allow_pickle"), path
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in ("eval", "exec", "yaml.load", "np.load", "numpy.load"), path
                if called == "torch.load":
                    given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                    assert given.get("weights_only") == "True", path
                    loads += 1
    assert loads >= 2
