"""The files in examples/ are what Ray Serve and KubeRay take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError

from radixkv.ray.options import ApplicationOptions

# The least that a cluster would have.
KUBERNETES = "1.30"
FOLDER = Path(__file__).parents[2] / "examples"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class HeadGroup(_Strict):
    """KubeRay's `HeadGroupSpec`, as far as it is used."""

    ray_start_params: dict[StrictStr, StrictStr] = Field(alias="rayStartParams")
    template: dict[str, Any]


class WorkerGroup(HeadGroup):
    """Its `WorkerGroupSpec`."""

    group_name: StrictStr = Field(alias="groupName")
    replicas: StrictInt
    min_replicas: StrictInt = Field(alias="minReplicas")
    max_replicas: StrictInt = Field(alias="maxReplicas")


class RayCluster(_Strict):
    """Its `RayClusterSpec`."""

    ray_version: StrictStr = Field(alias="rayVersion")
    enable_in_tree_autoscaling: bool = Field(alias="enableInTreeAutoscaling")
    head_group_spec: HeadGroup = Field(alias="headGroupSpec")
    worker_group_specs: list[WorkerGroup] = Field(alias="workerGroupSpecs")


class RayServiceSpec(_Strict):
    """Its `RayServiceSpec`."""

    serve_config: StrictStr = Field(alias="serveConfigV2")
    ray_cluster_config: RayCluster = Field(alias="rayClusterConfig")


class RayService(_Strict):
    """KubeRay's resource, by the reference of its API (ray.io/v1)."""

    api_version: StrictStr = Field(alias="apiVersion", pattern="^ray.io/v1$")
    kind: StrictStr = Field(pattern="^RayService$")
    metadata: dict[StrictStr, StrictStr]
    spec: RayServiceSpec


def check_manifest(content: dict[str, Any]) -> None:
    """Refuse what the operator, or Kubernetes for the pods that the operator makes, would not accept."""
    cluster = RayService.model_validate(content).spec.ray_cluster_config
    for group in (cluster.head_group_spec, *cluster.worker_group_specs):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, **group.template}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


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


@pytest.mark.parametrize("name", ["ray_serve.yaml", "ray_kubernetes.yaml"])
def test_serve_takes_the_configuration(name: str) -> None:
    from ray.serve.schema import ServeDeploySchema

    from radixkv.ray import app

    (application,) = ServeDeploySchema.model_validate(serve_config(name)).applications
    described = app(application.args)
    names = {"Ingress", "Engine"}
    assert {deployment.name for deployment in application.deployments} <= names
    assert described._bound_deployment.name == "Ingress"


def test_the_manifest_is_one_and_mistakes_in_it_are_found() -> None:
    check_manifest(manifest())
    mistakes: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
        ("headGroupSpecc", lambda cluster: cluster.update(headGroupSpecc=cluster.pop("headGroupSpec"))),
        ("rayVersion", lambda cluster: cluster.update(rayVersion=[1, 2])),
        (
            "volumeMountz",
            lambda cluster: container(cluster).update(volumeMountz=container(cluster).pop("volumeMounts")),
        ),
        ("limits", lambda cluster: container(cluster)["resources"].update(limits="8 cores")),
        ("num-cpus", lambda cluster: cluster["headGroupSpec"]["rayStartParams"].update({"num-cpus": 0})),
    ]
    for named, spoil in mistakes:
        spoiled = manifest()
        spoil(spoiled["spec"]["rayClusterConfig"])
        with pytest.raises((ValidationError, kubernetes_validate.ValidationError), match=named):
            check_manifest(spoiled)


def container(cluster: dict[str, Any]) -> dict[str, Any]:
    (group,) = cluster["workerGroupSpecs"]
    found: dict[str, Any] = group["template"]["spec"]["containers"][0]
    return found


def test_the_manifest_has_room_for_what_it_asks_for() -> None:
    spec = manifest()["spec"]
    (application,) = serve_config("ray_kubernetes.yaml")["applications"]
    arguments = application["args"]
    (workers,) = spec["rayClusterConfig"]["workerGroupSpecs"]
    pod = workers["template"]["spec"]
    limits = pod["containers"][0]["resources"]["limits"]
    assert float(limits["nvidia.com/gpu"]) * workers["maxReplicas"] >= arguments["num_gpus"] * arguments["max_replicas"]
    assert workers["minReplicas"] >= arguments["replicas"]
    # An ingress takes a core beside the replica's.
    assert int(limits["cpu"]) > arguments["num_cpus"]
    assert pod["terminationGracePeriodSeconds"] > arguments["grace_seconds"]
