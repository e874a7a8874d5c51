"""docs/scaling.md: its output is what the command prints, its figures what the planner and the manifests say."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from check_kubernetes import metrics_of, objects_of, seconds_to_end, server_of, settings_of
from hamburger.engine.plan.known_shapes import PRESETS, GraftName, with_graft
from hamburger.engine.plan.plan import Load, Machine, Plan, make_plan
from hamburger.engine.plan.shape import shape_of
from hamburger.model.parallel.step_shape import shard_trunk
from hamburger.server.cli import main
from hamburger.server.plan_arguments import add_plan_arguments
from hamburger.training.recipe import read_recipe

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "scaling.md").read_text()
BLOCKS = re.findall(r"^```console\n\$ hamburger (.*)\n((?:.*\n)*?)```", PAGE, flags=re.MULTILINE)
MANIFESTS = ROOT / "deploy" / "kubernetes"
CONTEXT = 16384


def rows(header: str) -> list[list[str]]:
    """The cells of the table that begins with this header."""
    [lines] = re.findall(rf"^\| {re.escape(header)} \|.*\n\|[- |]+\n((?:\|.*\n)+)", PAGE, flags=re.MULTILINE)
    return [line.strip("| ").split(" | ") for line in lines.splitlines()]


def planned(
    name: str, graft: GraftName, gigabytes: int, prompt: int = 1024, output: int = 512, g: float = 1, gpus: int = 1
) -> Plan:
    """A plan on a GPU or more, as the page says it: 16,384 tokens, and 3.35 TB/s."""
    shape = shape_of(name, with_graft(shard_trunk(PRESETS[name], gpus), graft), "bfloat16")
    machine = Machine(memory_bytes=gigabytes * 10**9, bandwidth=3.35e12)
    return make_plan(
        shape, machine, Load(prompt_tokens=prompt, output_tokens=output, tokens_per_kv=g, max_model_len=CONTEXT)
    )


def test_the_output_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert BLOCKS
    for command, output in BLOCKS:
        assert main(shlex.split(command)) == 0
        assert capsys.readouterr().out == output


def test_every_option_is_described() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    add_plan_arguments(parser)
    known = {action.option_strings[0] if action.option_strings else str(action.metavar) for action in parser._actions}
    described = [word for cells in rows("option") for word in re.findall(r"`([^`]+)`", cells[0])]
    assert set(described) == known - {"--base"}  # what `serve` says of it holds
    assert len(described) == len(set(described))


def test_the_shapes_are_those_of_the_code() -> None:
    table = rows("shape")
    assert [cells[0].strip("`") for cells in table] == list(PRESETS)
    for cells, t in zip(table, PRESETS.values(), strict=True):
        head = "tied" if t.tie_word_embeddings else "its own"
        numbers = [t.num_layers, t.hidden_size, t.intermediate_size, t.num_heads, t.num_kv_heads, t.head_dim]
        assert cells[1:] == [*map(str, [*numbers, t.vocab_size]), head, str(t.context_tokens)]


@pytest.mark.parametrize(("graft", "recipe"), [("published", "published"), ("fused", "adapter"), ("fused", "frozen")])
def test_the_grafts_are_those_of_the_recipes(graft: GraftName, recipe: str) -> None:
    for trunk in PRESETS.values():
        ours, theirs = with_graft(trunk, graft).graft, read_recipe(recipe).graft.config(trunk)
        assert ours is not None
        assert len(ours.feature_layers) == len(theirs.feature_layers)  # which ones they are changes no size
        assert replace(ours, feature_layers=theirs.feature_layers) == theirs


def test_memory_is_as_planned() -> None:
    assert f"`max_model_len` of {CONTEXT:,}:" in PAGE
    table = rows("model, GPU")
    assert {cells[0].split(",")[0].lower() for cells in table} == PRESETS.keys()
    for title, *cells in table:
        name, _, gpus, gigabytes = re.fullmatch(r"(.*), ((\d) x )?(\d+) gb", title.lower()).groups()  # type: ignore[union-attr]
        plan = planned(name, "published", int(gigabytes), gpus=int(gpus or 1))
        assert cells == [
            f"{plan.weights_bytes / 2**30:.2f} GiB",
            f"{plan.slot_bytes // 1024} KiB",
            f"{plan.pool_bytes / 2**30:.2f} GiB",
            f"{plan.pool_slots:,}",
        ], title


def test_requests_at_once_are_as_planned() -> None:
    table = rows("model, prompt + answer")
    assert len(table) == 6
    for title, *cells in table:
        name, tokens = title.split(", ")
        prompt, output = (int(part.replace(",", "")) for part in tokens.split(" + "))
        plans = [planned(name.lower(), "published", 80, prompt, output, g) for g in (1, 1.5, 2, 3)]
        found = [plan.concurrent_requests for plan in plans]
        assert cells == [*(f"{number:,}" for number in found), f"{found[2] / found[0]:.2f}"], title


def test_bounds_of_speed_are_as_planned() -> None:
    table = rows("model, graft")
    assert len(table) == 4
    for title, *cells in table:
        name, graft = title.rstrip("`").split(", `")
        shape: GraftName = "published" if graft == "published" else "fused"
        assert graft == shape
        speeds = [planned(name.lower(), shape, 80, g=g).speed for g in (1.5, 2, 3)]
        plain = {f"{speed.one_stream_plain:,.0f}" for speed in speeds if speed}
        assert cells == [*plain, *(f"{speed.one_stream:,.0f}" for speed in speeds if speed)], title


def test_what_it_says_of_the_manifests() -> None:
    text = " ".join(PAGE.split())
    [deployment] = objects_of((MANIFESTS / "base" / "deployment.yaml").read_text())
    [scaler] = objects_of((MANIFESTS / "base" / "autoscaler.yaml").read_text())
    grace, needed = seconds_to_end(deployment)
    settings, server, aims = settings_of(deployment), server_of(deployment), metrics_of(scaler)
    pause = server["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert f"waits {pause} s," in text
    assert f"drains for up to {needed - pause:g} s; after {grace} s it is killed" in text
    probe = server["startupProbe"]
    gpu = server_of(yaml.safe_load((MANIFESTS / "overlays" / "gpu" / "deployment.yaml").read_text()))["startupProbe"]
    period = probe["periodSeconds"]
    longest = (period * probe["failureThreshold"] // 60, period * gpu["failureThreshold"] // 60)
    assert "({} minutes at most, in the GPU overlay {})".format(*longest) in text
    assert f"waiting requests ({aims['hamburger_num_requests_waiting']} a replica)" in text
    assert f"the pool's use ({aims['hamburger_kv_cache_usage_perc']})" in text
    assert aims["hamburger_num_requests_running"] / int(settings["HAMBURGER_MAX_NUM_SEQS"]) == 0.75
    limits = server["resources"]["limits"]
    assert f"of {limits['cpu']} cores and {limits['memory'].removesuffix('Gi')} GiB each" in text


def test_the_alerts_become_a_rule_of_the_operator() -> None:
    [command] = re.findall(r"^(\{ printf .*?\}) \| kubectl apply --filename -$", PAGE, flags=re.MULTILINE | re.DOTALL)
    text = subprocess.run(["bash", "-c", command], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    rule = yaml.safe_load(text)
    assert (rule["kind"], rule["metadata"]) == ("PrometheusRule", {"name": "hamburger"})
    assert rule["spec"] == yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())


def test_the_overlays_that_it_names_are_there() -> None:
    overlays = sorted(path.name for path in (MANIFESTS / "overlays").iterdir())
    assert [cells[0].strip("`") for cells in rows("overlay")] == overlays
    assert set(re.findall(r"deploy/kubernetes/overlays/(\w+)", PAGE)) <= set(overlays)
