"""A Ray cluster of this process with our Serve application; each line of stdin is a command, each of stdout its answer.

{"deploy": {"args": ..., "deployments": ...}}   what deploy/ray-serve.yaml says, with these changes; answers when it
                                                runs. Again: a rolling update
{"replicas": null}                              the process ids of the engine replicas that run, by name
{"stop": null}                                  ends everything
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import ray
import yaml
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

CONFIG = Path(__file__).parents[3] / "deploy/ray-serve.yaml"


def main() -> None:
    port, num_cpus, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    ray.init(
        num_cpus=num_cpus,
        object_store_memory=120 * 2**20,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
        _temp_dir=folder,
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"log_level": "WARNING"})
    try:
        for line in sys.stdin:
            ((command, given),) = json.loads(line).items()
            answer = deploy(**given) if command == "deploy" else replicas()
            print("answer", json.dumps(answer), flush=True)
    finally:
        serve.shutdown()
        ray.shutdown()


def deploy(args: dict[str, Any], deployments: list[dict[str, Any]]) -> str:
    """Returns "RUNNING", or what went wrong."""
    config = yaml.safe_load(CONFIG.read_text())
    (application,) = config["applications"]
    application["args"] |= args
    application["deployments"] = deployments
    client = _get_global_client()
    client.deploy_apps(ServeDeploySchema.model_validate(config))  # as `serve run FILE` does
    while True:
        status = serve.status().applications[application["name"]]
        settled = all(deployment.status == "HEALTHY" for deployment in status.deployments.values())
        if status.status == "RUNNING" and settled:
            return status.status
        if status.status == "DEPLOY_FAILED":
            return status.message
        time.sleep(0.5)


def replicas() -> dict[str, int]:
    applications = _get_global_client().get_serve_details()["applications"]
    listed = applications["hamburger"]["deployments"]["engine"]["replicas"]
    return {replica["replica_id"]: replica["pid"] for replica in listed if replica["state"] == "RUNNING"}


main()
