"""The configuration of an application under Ray Serve: options of server, model, engine, and of their placement."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from pydantic import Field, field_validator

from radixkv.config import Config, EngineConfig, ModelConfig
from radixkv.llm_options import LLMOptions, llm_configs
from radixkv.option_words import Accepted, refuse_unknown
from radixkv.server.config import ServerConfig

# They belong to one process; and the ingress does not know how long a request waits on a replica.
_NOT_UNDER_RAY = (
    "uds",
    "metrics_port",
    "record_trace",
    "kv_events_endpoint",
    "kv_events_replay_endpoint",
    "queue_timeout",
)
# Where ingresses do not listen themselves, nothing here reads them: Ray Serve's proxy has the connections.
_OF_OWN_SOCKETS = ("ssl_certfile", "receive_timeout", "send_timeout")
_OBJECTS = frozenset({"tokenizer", "tiers"})


class PlacementConfig(Config):
    """How many engines there are, and where."""

    replicas: int | None = Field(default=None, ge=1)
    """Engines, each in a process of its own, that answer as one, placed by Ray Serve (radixkv[ray]). By default one, in the
    server's process, without Ray."""
    max_replicas: int | None = Field(default=None, ge=1)
    """Start more replicas under load, up to this many, and stop them afterwards."""
    requests_per_replica: int | None = Field(default=None, ge=1)
    """With max_replicas: unfinished requests per replica. By default as many as run at the same time."""
    scale_up_delay: float = Field(default=30.0, ge=0)
    """With max_replicas: seconds that the load must be too high before a replica is started."""
    scale_down_delay: float = Field(default=600.0, ge=0)
    """With max_replicas: seconds that the load must be too low before one is stopped."""
    ingresses: int = Field(default=1, ge=1)
    """Processes that take requests, each at host and port of the machine where Ray places it."""
    num_cpus: float | None = Field(default=None, gt=0)
    """Cores, and threads, of each replica. By default 1; without a ray_address, an equal part of the machine."""
    num_gpus: float = Field(default=0.0, ge=0)
    """GPUs of a replica."""
    ray_address: str | None = None
    """Join the Ray cluster at this address: auto, or 10.0.0.1:6379. By default a local one, which ends with the server."""

    @field_validator("ray_address")
    @classmethod
    def _is_address(cls, given: str | None) -> str | None:
        host, _, port = (given or "").rpartition(":")
        if given not in (None, "auto") and not (host and port.isdecimal()):
            raise ValueError(f"ray_address: expected auto or HOST:PORT, got {given!r:.80}")
        return given

    def _check_together(self) -> None:
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            raise ValueError(
                f"max_replicas: expected at least as many as replicas, {self.min_replicas}, got {self.max_replicas}"
            )
        if self.max_replicas is None:
            for name in ("requests_per_replica", "scale_up_delay", "scale_down_delay"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name}: expected a max_replicas with it")

    @property
    def by_ray(self) -> bool:
        """Whether Ray Serve is to place the engines."""
        return any(value is not None for value in (self.replicas, self.max_replicas, self.ray_address))

    @property
    def min_replicas(self) -> int:
        """Replicas that there always are."""
        return self.replicas or 1

    @property
    def most_replicas(self) -> int:
        """Replicas that there may be."""
        return self.max_replicas or self.min_replicas


@dataclass(frozen=True)
class ApplicationOptions:
    """Everything that an application is made of.

    Attributes:
        own_socket: whether ingresses listen themselves; otherwise requests come by Ray Serve's proxy.
        replica_host: the address on which replicas listen for ingresses; None: that of their machine.
    """

    server: ServerConfig
    llm: LLMOptions
    placement: PlacementConfig
    own_socket: bool
    replica_host: str | None = None

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> ApplicationOptions:
        """From the arguments of a Serve application; text, as `serve run` passes it, is converted to the option's type.

        Ingresses have a socket of their own if ``host`` or ``port`` is among the arguments.

        Raises:
            TypeError: an argument is unknown.
            ValueError: a value is impossible, or the option has no meaning under Ray.
        """
        fields = {
            name: field
            for config in (ServerConfig, ModelConfig, EngineConfig, PlacementConfig)
            for name, field in config.model_fields.items()
            if name not in _OBJECTS
        }
        refuse_unknown("radixkv.ray.app", arguments, fields)
        values = {name: _parsed(value, Accepted.of(fields[name])) for name, value in arguments.items()}
        options = cls.of_parts(values, own_socket="host" in values or "port" in values)
        server = options.server
        if not (options.own_socket or server.api_keys or server.keys_file or server.allow_unauthenticated):
            raise ValueError(
                "api_keys: whoever can reach Ray Serve's proxy could use the server, since there are no API keys; set "
                "api_keys or keys_file, or allow_unauthenticated if that is what you want"
            )
        return options

    @classmethod
    def of_parts(cls, values: Mapping[str, Any], *, own_socket: bool) -> ApplicationOptions:
        """From options by name, each of its own type.

        Raises:
            ValueError: a value is impossible, or the option has no meaning under Ray.
        """
        for name in _NOT_UNDER_RAY:
            if values.get(name) is not None:
                raise ValueError(f"{name}: expected None where Ray places replicas, got {values[name]!r}")
        if values.get("disk_cache") is not None and not values.get("disk_cache_read_only"):
            raise ValueError(
                f"disk_cache: expected None, or disk_cache_read_only with it, where Ray places replicas: one process writes "
                f"to a folder, got {values['disk_cache']!r}; shared_cache is for several"
            )
        if values.get("seed") not in (None, 0):
            raise ValueError(
                f"seed: expected 0 where Ray places replicas: ingresses draw one for each request, got {values['seed']}"
            )
        for name in () if own_socket else _OF_OWN_SOCKETS:
            if values.get(name) is not None:
                raise ValueError(
                    f"{name}: expected host or port with it: Ray Serve's proxy has the connections otherwise"
                )
        server = ServerConfig(**_part(ServerConfig, values))
        placement = PlacementConfig(**_part(PlacementConfig, values))
        llm = cast(LLMOptions, {**_part(ModelConfig, values), **_part(EngineConfig, values)})
        llm_configs(llm)
        return cls(server, llm, placement, own_socket)


def cpus_per_replica(placement: PlacementConfig) -> float:
    """Cores of a replica, where all replicas are on this machine."""
    return placement.num_cpus or max(1.0, (os.cpu_count() or 1) // placement.most_replicas)


def _part(config: type[Config], values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in config.model_fields}


def _parsed(value: Any, accepted: Accepted) -> Any:
    """Text becomes the number, truth value or list that the option expects; other text stays, for the option to refuse."""
    if not isinstance(value, str) or str in accepted.kinds or accepted.kinds[0] is Any:
        return value
    if accepted.kinds[0] not in (bool, int, float):
        return value.split() if "tuple" in str(accepted.kinds[0]) else value
    try:
        return json.loads(value.lower())
    except ValueError:
        return value
