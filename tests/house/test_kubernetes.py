"""deploy/kubernetes agrees with the image, settings and metrics; and the check of what is rendered finds faults."""

import copy
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import check_kubernetes
from check_kubernetes import Object, faults, metrics_of, objects_of, pod_of, seconds_to_end, server_of, settings_of
from fake_engines import fake_engine
from hamburger.engine.plan.known_shapes import PRESETS
from hamburger.engine.plan.plan import Load, Machine, make_plan
from hamburger.engine.plan.shape import shape_of
from hamburger.model.config import ModelConfig
from hamburger.server.config import ENV_PREFIX, ServeSettings
from hamburger.server.load_settings import load_settings
from hamburger.server.operation.metrics import ServerMetrics
from hamburger.server.serve import _CLOSE_SECONDS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
DOCKERFILE = (ROOT / "Dockerfile").read_text()
OVERLAYS = sorted(path.parent.name for path in FOLDER.glob("overlays/*/kustomization.yaml"))
MANIFESTS = [path for path in FOLDER.glob("*/**/*.yaml") if path.name != "kustomization.yaml"]
KUBECTL = shutil.which("kubectl")
# What the server and its libraries read besides the settings.
OTHER_VARIABLES = {"HF_TOKEN", "HF_HUB_OFFLINE"}


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def base() -> list[Object]:
    """The base as kustomize renders it: its kustomization only lists files."""
    listed = read(FOLDER / "base" / "kustomization.yaml")
    assert set(listed) == {"apiVersion", "kind", "resources"}
    return [item for name in listed["resources"] for item in objects_of((FOLDER / "base" / name).read_text())]


def of_kind(objects: list[Object], kind: str) -> Object:
    return next(item for item in objects if item["kind"] == kind)


def deployments() -> Iterator[Object]:
    """The base's, and the overlays' patches of it."""
    for path in MANIFESTS:
        for item in objects_of(path.read_text()):
            if item["kind"] == "Deployment":
                yield item


def test_every_file_is_used() -> None:
    used = set()
    for path in FOLDER.glob("**/kustomization.yaml"):
        listed = read(path)
        names = [*listed["resources"], *(patch["path"] for patch in listed.get("patches", []))]
        used |= {(path.parent / name).resolve() for name in names}
    assert {path.resolve() for path in MANIFESTS} | {FOLDER / "base"} == used


def test_the_base_fits_together() -> None:
    assert faults(base()) == []


@pytest.mark.skipif(KUBECTL is None, reason="kubectl renders the overlays; deploy/verify.sh kubernetes does so in CI")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_overlays_fit_together(overlay: str) -> None:
    command = [str(KUBECTL), "kustomize", str(FOLDER / "overlays" / overlay)]
    objects = objects_of(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert faults(objects) == []
    image = server_of(of_kind(objects, "Deployment"))["image"]
    assert image == {"cpu": "hamburger-serve:cpu", "gpu": "hamburger-serve:cuda"}[overlay]
    assert image in (ROOT / "docker-compose.yml").read_text()


def test_the_pods_run_as_the_images_user() -> None:
    context = pod_of(of_kind(base(), "Deployment"))["securityContext"]
    user, group = re.findall(r"^USER (\d+):(\d+)$", DOCKERFILE, flags=re.MULTILINE)[-1]
    assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (int(user), int(group), int(group))


def test_the_port_is_the_images() -> None:
    [port] = server_of(of_kind(base(), "Deployment"))["ports"]
    assert f"EXPOSE {port['containerPort']}\n" in DOCKERFILE
    assert port["containerPort"] == ServeSettings.model_fields["port"].default


def test_variables_are_settings_and_their_values_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {ENV_PREFIX + name.upper() for name in ServeSettings.model_fields}
    for deployment in deployments():
        assert {item["name"] for item in server_of(deployment)["env"]} <= names | OTHER_VARIABLES
        for name, value in settings_of(deployment).items():
            assert isinstance(value, str), name
            monkeypatch.setenv(name, value)
        load_settings({}).engine_args()


def test_a_pod_has_time_to_drain_and_to_close() -> None:
    grace, needed = seconds_to_end(of_kind(base(), "Deployment"))
    assert grace > needed + _CLOSE_SECONDS


async def test_the_autoscalers_metrics_are_exported_and_the_adapter_offers_them() -> None:
    scalers = [
        item for path in MANIFESTS for item in objects_of(path.read_text()) if item["kind"] == "HorizontalPodAutoscaler"
    ]
    queries = check_kubernetes.queries_of(read(FOLDER / "prometheus-adapter.yaml"))
    assert len(scalers) == 2
    for scaler in scalers:
        assert metrics_of(scaler).keys() == queries.keys()
    metrics = ServerMetrics("name")
    async with fake_engine() as engine:
        metrics.add_gauges(engine)
        gauges = set(re.findall(r"^# TYPE (\w+) gauge$", metrics.render().decode(), flags=re.MULTILINE))
    assert queries.keys() <= gauges
    for name, query in queries.items():
        assert re.findall(r"hamburger_\w+", query) == [name]


def test_the_alerts_find_the_server_whatever_its_service_is_called() -> None:
    """An overlay may give names a prefix (kustomize's namePrefix), which labels do not get."""
    service = of_kind(base(), "Service")["metadata"]["labels"][of_kind(base(), "ServiceMonitor")["spec"]["jobLabel"]]
    alerts = (ROOT / "deploy" / "prometheus" / "alerts.yml").read_text()
    assert set(re.findall(r'job="(\w+)"', alerts)) == {service}


def test_the_gpu_overlays_figures_fit_the_gpu_that_it_names() -> None:
    text = (FOLDER / "overlays" / "gpu" / "deployment.yaml").read_text()
    [gigabytes] = re.findall(r"an (\d+) GB GPU", text)
    deployment = yaml.safe_load(text)
    given = {name.removeprefix(ENV_PREFIX).lower(): value for name, value in settings_of(deployment).items()}
    settings = load_settings(given).engine_args()
    assert settings.model is not None
    preset = settings.model.partition("/")[2].lower().removesuffix("-instruct")
    shape = shape_of(preset, ModelConfig(trunk=PRESETS[preset]), "bfloat16")
    memory = int(gigabytes) * 10**9
    machine = Machine(memory_bytes=memory, kv_cache_memory=settings.kv_cache_memory)
    load = Load(
        prompt_tokens=1024,
        output_tokens=512,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        block_size=settings.block_size,
    )
    plan = make_plan(shape, machine, load)
    assert plan.concurrent_requests == settings.max_num_seqs
    assert settings.kv_cache_memory is not None
    # A tenth of what is left stays free for the steps themselves, as where the server sizes the pool.
    assert settings.kv_cache_memory <= 0.9 * (memory - plan.weights_bytes)


HIDDEN = {"name": "HAMBURGER_PUBLIC_OPERATION", "value": "false"}
Change = Callable[[dict[str, Object]], object]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda o: o.pop("NetworkPolicy"), "NetworkPolicy: there must be one"),
        (lambda o: o["Service"]["spec"].update(selector={"app": "x"}), "Service: its selector"),
        (lambda o: o["ServiceMonitor"]["spec"]["selector"]["matchLabels"].update(a="b"), "does not find the Service"),
        (lambda o: o["ServiceMonitor"]["spec"]["endpoints"][0].update(port="web"), "the Service has no port web"),
        (lambda o: o["Service"]["spec"]["ports"][0].update(targetPort="web"), "the container has no port web"),
        (lambda o: o["ServiceAccount"]["metadata"].update(name="x"), "there is no ServiceAccount hamburger"),
        (lambda o: o["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"].update(name="x"), "there is no Deployment x"),
        (lambda o: o["HorizontalPodAutoscaler"]["spec"].update(maxReplicas=1), "minReplicas must be"),
        (lambda o: o["Deployment"]["spec"].update(replicas=2), "replicas are the autoscaler's"),
        (lambda o: o["Deployment"]["spec"].update(progressDeadlineSeconds=60), "a pod may take 600 s to start"),
        (lambda o: o["Deployment"]["spec"]["strategy"]["rollingUpdate"].update(maxUnavailable=1), "must be 0"),
        (lambda o: pod_of(o["Deployment"]).update(terminationGracePeriodSeconds=130), "draining take 130"),
        (lambda o: pod_of(o["Deployment"]).pop("enableServiceLinks"), "comes as HAMBURGER_PORT"),
        (lambda o: pod_of(o["Deployment"]).pop("automountServiceAccountToken"), "automountServiceAccountToken: it is"),
        (lambda o: pod_of(o["Deployment"])["securityContext"].pop("seccompProfile"), "seccompProfile: it is None"),
        (lambda o: pod_of(o["Deployment"])["volumes"].pop(), "which is not there"),
        (lambda o: server_of(o["Deployment"])["volumeMounts"].pop(0), "writes to /tmp"),
        (lambda o: server_of(o["Deployment"])["env"][1].update(value="12"), "aim for running is never passed"),
        (
            lambda o: server_of(o["Deployment"])["env"].append(HIDDEN),
            "probes and Prometheus have no key",
        ),
        (lambda o: server_of(o["Deployment"])["readinessProbe"]["httpGet"].update(path="/health"), "not /ready"),
        (lambda o: server_of(o["Deployment"])["securityContext"].pop("capabilities"), "capabilities: it is None"),
        (lambda o: server_of(o["Deployment"])["resources"]["limits"].pop("cpu"), "no limit of cpu"),
        (lambda o: o["PodDisruptionBudget"]["spec"].update(maxUnavailable=0), "keeps its node"),
    ],
)
def test_the_check_finds_what_does_not_fit(change: Change, words: str) -> None:
    objects = {item["kind"]: copy.deepcopy(item) for item in base()}
    change(objects)
    [found] = faults(list(objects.values()))
    assert words in found


def test_a_claim_must_be_there() -> None:
    objects = base()
    pod_of(of_kind(objects, "Deployment"))["volumes"][1] = {
        "name": "cache",
        "persistentVolumeClaim": {"claimName": "hamburger-cache"},
    }
    [found] = faults(objects)
    assert "the claim hamburger-cache, which is not there" in found
    assert faults([*objects, read(FOLDER / "overlays" / "gpu" / "cache.yaml")]) == []
