"""The Serve application: ingresses, engines, and the registry by which they find each other."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve import Application

from radixkv.config import DEVICE_DEFAULTS, ModelConfig
from radixkv.ray.engine import EngineDeployment
from radixkv.ray.ingress import ListeningIngress, ProxiedIngress
from radixkv.ray.memory import replica_memory
from radixkv.ray.options import ApplicationOptions
from radixkv.ray.registry import Registry
from radixkv.ray.scaling import LoadPolicy
from radixkv.server.run import namespaces_secret

# How often Serve asks each process for its health; one that was killed is missed and replaced after about as long.
_HEALTH_CHECK_SECONDS = 2.0
# How long Serve waits before it asks whether a process that is to end still runs requests that came by Serve: only calls
# come that way, and these are made again elsewhere.
_SECONDS_TO_LOOK = 0.2
# For a process to end, in addition to grace_seconds.
_SECONDS_TO_END = 15.0
# Serve takes the mean of what replicas report over at least this long: it measures every ten seconds.
_SECONDS_TO_LOOK_BACK = 10.5
# An option that a model does not allow is reported at once, not after Serve's twenty attempts.
_ATTEMPTS_TO_START = 1


def build(options: ApplicationOptions) -> Application:
    """The application, of which `serve.run` makes processes.

    Args:
        options: of everything.

    Raises:
        OSError, ValueError: see `namespaces_secret`.
    """
    server, placement = options.server, options.placement
    lifecycle: dict[str, Any] = {
        "health_check_period_s": _HEALTH_CHECK_SECONDS,
        "max_constructor_retry_count": _ATTEMPTS_TO_START,
        "graceful_shutdown_timeout_s": server.grace_seconds + _SECONDS_TO_END,
    }
    at_once = {**lifecycle, "graceful_shutdown_wait_loop_s": _SECONDS_TO_LOOK}
    registry = (
        serve.deployment(Registry, name="Registry")
        .options(
            ray_actor_options={"num_cpus": 0},
            logging_config={"enable_access_log": False},  # every process calls it each second
            **at_once,
        )
        .bind()
    )
    engine = serve.deployment(EngineDeployment, name="Engine").options(
        ray_actor_options={
            "num_cpus": placement.num_cpus or 1,
            "num_gpus": placement.num_gpus,
            # Ray puts no more replicas on a machine than fit.
            "memory": replica_memory(server.model, options.llm, on_gpu=placement.num_gpus > 0).total,
        },
        # If there is only one replica, its successor is up before it goes; otherwise others take its streams, and an update
        # needs no more resources than there are.
        max_surge_percent=100 if placement.min_replicas == 1 else 0,
        **_number_of_engines(options),
        **at_once,
    )
    ingress = serve.deployment(ListeningIngress if options.own_socket else ProxiedIngress, name="Ingress").options(
        num_replicas=placement.ingresses,
        ray_actor_options={"num_cpus": 1},
        max_surge_percent=100,
        # The ingress itself says 429 when there is too much to do.
        max_ongoing_requests=placement.most_replicas * (_sequences(options) + server.max_queue),
        **(at_once if options.own_socket else lifecycle),
    )
    engines = engine.bind(registry, server, options.llm, options.replica_host)
    names = ("chat_template", "tool_call_parser", "reasoning_parser")
    values: dict[str, Any] = {name: value for name, value in options.llm.items() if name in names}
    reading = ModelConfig(**values)
    return ingress.bind(registry, engines, server, reading, namespaces_secret(options.llm))


def _number_of_engines(options: ApplicationOptions) -> dict[str, Any]:
    placement = options.placement
    if placement.max_replicas is None:
        return {"num_replicas": placement.min_replicas}
    per_replica = placement.requests_per_replica or _sequences(options)
    return {
        "autoscaling_config": {
            "min_replicas": placement.min_replicas,
            "max_replicas": placement.max_replicas,
            "upscale_delay_s": placement.scale_up_delay,
            "downscale_delay_s": placement.scale_down_delay,
            "look_back_period_s": min(30.0, max(_SECONDS_TO_LOOK_BACK, placement.scale_up_delay)),
            "policy": {"policy_function": LoadPolicy, "policy_kwargs": {"requests_per_replica": per_replica}},
        }
    }


def _sequences(options: ApplicationOptions) -> int:
    """How many sequences run side by side on one replica."""
    device = "cuda" if options.placement.num_gpus else "cpu"
    return int(options.llm.get("max_num_seqs") or DEVICE_DEFAULTS[device]["max_num_seqs"])
