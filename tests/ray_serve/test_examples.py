"""The files in examples/ are what Ray Serve and KubeRay take."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import yaml

from radixkv.ray.options import ApplicationOptions

FOLDER = Path(__file__).parents[2] / "examples"
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs radixkv[ray]")


def manifest() -> dict[str, Any]:
    return dict(yaml.safe_load((FOLDER / "ray_kubernetes.yaml").read_text()))


def serve_config(name: str) -> dict[str, Any]:
    text = (FOLDER / name).read_text() if name == "ray_serve.yaml" else manifest()["spec"]["serveConfigV2"]
    return dict(yaml.safe_load(text))


@pytest.mark.parametrize("name", ["ray_serve.yaml", "ray_kubernetes.yaml"])
def test_arguments_are_options(name: str) -> None:
    (application,) = serve_config(name)["applications"]
    assert application["import_path"] == "radixkv.ray:app"
    options = ApplicationOptions.of(application["args"])
    assert not options.own_socket
    assert options.placement.most_replicas > options.placement.min_replicas == 2


@needs_ray
@pytest.mark.parametrize("name", ["ray_serve.yaml", "ray_kubernetes.yaml"])
def test_serve_takes_the_configuration(name: str) -> None:
    from ray.serve.schema import ServeDeploySchema

    from radixkv.ray import app

    (application,) = ServeDeploySchema.model_validate(serve_config(name)).applications
    described = app(application.args)
    names = {"Ingress", "Engine"}
    assert {deployment.name for deployment in application.deployments} <= names
    assert described._bound_deployment.name == "Ingress"


def test_the_manifest_has_room_for_what_it_asks_for() -> None:
    spec = manifest()["spec"]
    (application,) = serve_config("ray_kubernetes.yaml")["applications"]
    arguments = application["args"]
    (workers,) = spec["rayClusterConfig"]["workerGroupSpecs"]
    pod = workers["template"]["spec"]
    limits = pod["containers"][0]["resources"]["limits"]
    assert (manifest()["apiVersion"], manifest()["kind"]) == ("ray.io/v1", "RayService")
    assert float(limits["nvidia.com/gpu"]) * workers["maxReplicas"] >= arguments["num_gpus"] * arguments["max_replicas"]
    assert workers["minReplicas"] >= arguments["replicas"]
    # An ingress takes a core beside the replica's.
    assert int(limits["cpu"]) > arguments["num_cpus"]
    assert pod["terminationGracePeriodSeconds"] > arguments["grace_seconds"]
