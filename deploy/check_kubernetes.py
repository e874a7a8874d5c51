#!/usr/bin/env python3
"""Checks what kustomize rendered: names, labels, ports and figures fit together, and no privilege is left.

    kubectl kustomize deploy/kubernetes/overlays/cpu | python3 deploy/check_kubernetes.py
    python3 deploy/check_kubernetes.py --queries deploy/kubernetes/prometheus-adapter.yaml

The second writes the adapter's queries as rules that promtool can check. Needs PyYAML.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]
KINDS = (
    "ServiceAccount",
    "Deployment",
    "Service",
    "HorizontalPodAutoscaler",
    "PodDisruptionBudget",
    "NetworkPolicy",
    "ServiceMonitor",
)
PROBES = {"startupProbe": "/health", "livenessProbe": "/health", "readinessProbe": "/ready"}


def objects_of(text: str) -> list[Object]:
    """The objects of a YAML stream."""
    return [item for item in yaml.safe_load_all(text) if item]


def faults(objects: Sequence[Object]) -> list[str]:
    """One line for each thing that does not fit; none where all is well."""
    kinds = [item["kind"] for item in objects]
    lacking = [
        f"{kind}: there must be one, and there are {kinds.count(kind)}" for kind in KINDS if kinds.count(kind) != 1
    ]
    if lacking:
        return lacking
    by_kind = {item["kind"]: item for item in objects}
    claims = {item["metadata"]["name"] for item in objects if item["kind"] == "PersistentVolumeClaim"}
    deployment = by_kind["Deployment"]
    return [
        *_labels(by_kind),
        *_ports(by_kind),
        *_scaling(by_kind),
        *_lifecycle(deployment),
        *_privileges(deployment),
        *_volumes(deployment, claims),
    ]


def pod_of(deployment: Object) -> Object:
    """The specification of its pods."""
    pod: Object = deployment["spec"]["template"]["spec"]
    return pod


def server_of(deployment: Object) -> Object:
    """The one container."""
    [container] = pod_of(deployment)["containers"]
    found: Object = container
    return found


def settings_of(deployment: Object) -> dict[str, str]:
    """The environment variables that have a value of their own."""
    return {item["name"]: item["value"] for item in server_of(deployment)["env"] if "value" in item}


def seconds_to_end(deployment: Object) -> tuple[int, float]:
    """Seconds that a pod is given to end, and those that it may use: waiting before the signal, then draining."""
    pause = server_of(deployment)["lifecycle"]["preStop"]["sleep"]["seconds"]
    return pod_of(deployment)["terminationGracePeriodSeconds"], pause + float(
        settings_of(deployment)["HAMBURGER_DRAIN_SECONDS"]
    )


def metrics_of(autoscaler: Object) -> dict[str, Decimal]:
    """The metrics that it reads -> the average that it aims at."""
    found = {}
    for metric in autoscaler["spec"]["metrics"]:
        text = str(metric["pods"]["target"]["averageValue"])
        value = Decimal(text.removesuffix("m")) / (1000 if text.endswith("m") else 1)
        found[metric["pods"]["metric"]["name"]] = value
    return found


def queries_of(adapter: Mapping[str, Any]) -> dict[str, str]:
    """The metrics that prometheus-adapter's rules match -> the query that it asks of Prometheus for two pods."""
    found = {}
    for rule in adapter["rules"]["custom"]:
        name = rule["seriesQuery"].partition("{")[0]
        query = rule["metricsQuery"].replace("<<.Series>>", name).replace("<<.GroupBy>>", "pod")
        found[name] = query.replace("<<.LabelMatchers>>", 'namespace="default",pod=~"a|b"')
    return found


def _labels(by_kind: Mapping[str, Object]) -> Iterator[str]:
    spec = by_kind["Deployment"]["spec"]
    labels = spec["template"]["metadata"]["labels"].items()
    selectors = {
        "Deployment": spec["selector"]["matchLabels"],
        "Service": by_kind["Service"]["spec"]["selector"],
        "PodDisruptionBudget": by_kind["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        "NetworkPolicy": by_kind["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
    }
    for i, spread in enumerate(spec["template"]["spec"].get("topologySpreadConstraints", [])):
        selectors[f"topologySpreadConstraints[{i}]"] = spread["labelSelector"]["matchLabels"]
    for kind, selector in selectors.items():
        if not selector or not selector.items() <= labels:
            yield f"{kind}: its selector {selector} does not find the Deployment's pods"
    monitored = by_kind["ServiceMonitor"]["spec"]["selector"]["matchLabels"]
    if not monitored.items() <= by_kind["Service"]["metadata"]["labels"].items():
        yield f"ServiceMonitor: its selector {monitored} does not find the Service"
    account = pod_of(by_kind["Deployment"])["serviceAccountName"]
    if account != by_kind["ServiceAccount"]["metadata"]["name"]:
        yield f"Deployment: there is no ServiceAccount {account}"


def _ports(by_kind: Mapping[str, Object]) -> Iterator[str]:
    server = server_of(by_kind["Deployment"])
    names = {port["name"] for port in server["ports"]}
    used = {f"Service port {port['name']}": port["targetPort"] for port in by_kind["Service"]["spec"]["ports"]}
    for rule in by_kind["NetworkPolicy"]["spec"]["ingress"]:
        used |= {f"NetworkPolicy port {port['port']}": port["port"] for port in rule["ports"]}
    for probe, path in PROBES.items():
        asked = server[probe]["httpGet"]
        used[probe] = asked["port"]
        if asked["path"] != path:
            yield f"{probe}: it asks {asked['path']}, not {path}"
    for what, port in used.items():
        if port not in names:
            yield f"{what}: the container has no port {port}"
    services = {port["name"] for port in by_kind["Service"]["spec"]["ports"]}
    for endpoint in by_kind["ServiceMonitor"]["spec"]["endpoints"]:
        if endpoint["port"] not in services:
            yield f"ServiceMonitor: the Service has no port {endpoint['port']}"


def _scaling(by_kind: Mapping[str, Object]) -> Iterator[str]:
    deployment, scaler = by_kind["Deployment"], by_kind["HorizontalPodAutoscaler"]["spec"]
    target = scaler["scaleTargetRef"]
    if (target["kind"], target["name"]) != ("Deployment", deployment["metadata"]["name"]):
        yield f"HorizontalPodAutoscaler: there is no {target['kind']} {target['name']}"
    if "replicas" in deployment["spec"]:
        yield "Deployment: replicas are the autoscaler's, and applying the file would reset them"
    if not 1 <= scaler["minReplicas"] <= scaler["maxReplicas"]:
        yield "HorizontalPodAutoscaler: minReplicas must be from 1 to maxReplicas"
    aims = metrics_of(by_kind["HorizontalPodAutoscaler"])
    seats = int(settings_of(deployment)["HAMBURGER_MAX_NUM_SEQS"])
    if aims["hamburger_num_requests_running"] >= seats:
        yield f"HorizontalPodAutoscaler: a replica runs {seats} answers at most, so its aim for running is never passed"
    if not 0 < aims["hamburger_kv_cache_usage_perc"] < 1:
        yield "HorizontalPodAutoscaler: the pool's usage is from 0 to 1"
    if by_kind["PodDisruptionBudget"]["spec"].get("maxUnavailable") != 1:
        yield "PodDisruptionBudget: maxUnavailable must be 1, or a single replica keeps its node"


def _lifecycle(deployment: Object) -> Iterator[str]:
    grace, needed = seconds_to_end(deployment)
    if grace <= needed:
        yield f"terminationGracePeriodSeconds: {grace}, and preStop and draining take {needed:g}"
    probe = server_of(deployment)["startupProbe"]
    start = probe["periodSeconds"] * probe["failureThreshold"]
    if deployment["spec"]["progressDeadlineSeconds"] <= start:
        yield f"progressDeadlineSeconds: a pod may take {start} s to start"
    if deployment["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] != 0:
        yield "strategy: maxUnavailable must be 0, so that an update takes no replica away"
    if pod_of(deployment).get("enableServiceLinks") is not False:
        yield "enableServiceLinks: it must be false, or the Service's address comes as HAMBURGER_PORT"
    if settings_of(deployment).get("HAMBURGER_PUBLIC_OPERATION", "true").lower() not in ("true", "1"):
        yield "HAMBURGER_PUBLIC_OPERATION: probes and Prometheus have no key"


def _privileges(deployment: Object) -> Iterator[str]:
    pod, server = pod_of(deployment), server_of(deployment)
    wanted: dict[str, tuple[Any, Any]] = {
        "automountServiceAccountToken": (pod.get("automountServiceAccountToken"), False),
        "runAsNonRoot": (pod["securityContext"].get("runAsNonRoot"), True),
        "seccompProfile": (pod["securityContext"].get("seccompProfile"), {"type": "RuntimeDefault"}),
        "allowPrivilegeEscalation": (server["securityContext"].get("allowPrivilegeEscalation"), False),
        "readOnlyRootFilesystem": (server["securityContext"].get("readOnlyRootFilesystem"), True),
        "capabilities": (server["securityContext"].get("capabilities"), {"drop": ["ALL"]}),
        "hostNetwork": (pod.get("hostNetwork", False), False),
        "privileged": (server["securityContext"].get("privileged", False), False),
    }
    for name, (found, right) in wanted.items():
        if found != right:
            yield f"{name}: it is {found}, not {right}"
    limits = server["resources"]["limits"]
    for name in ("cpu", "memory"):
        if name not in limits:
            yield f"resources: there is no limit of {name}"


def _volumes(deployment: Object, claims: set[str]) -> Iterator[str]:
    volumes = {volume["name"]: volume for volume in pod_of(deployment)["volumes"]}
    mounted = {mount["mountPath"]: mount["name"] for mount in server_of(deployment)["volumeMounts"]}
    for path in ("/tmp", "/cache"):
        if path not in mounted:
            yield f"volumeMounts: the server writes to {path}, which is read-only"
    for path, name in mounted.items():
        if name not in volumes:
            yield f"volumeMounts: {path} is the volume {name}, which is not there"
    for name, volume in volumes.items():
        claim = volume.get("persistentVolumeClaim", {}).get("claimName")
        if claim is not None and claim not in claims:
            yield f"volumes: {name} is the claim {claim}, which is not there"


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["--queries"]:
        queries = queries_of(yaml.safe_load(Path(arguments[1]).read_text()))
        rules = [{"record": f"{name}:adapter", "expr": query} for name, query in queries.items()]
        print(yaml.safe_dump({"groups": [{"name": "adapter", "rules": rules}]}))
        return 0
    found = faults(objects_of(sys.stdin.read()))
    for line in found:
        print(line, file=sys.stderr)
    print(f"{len(found)} faults")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
