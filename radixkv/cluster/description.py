"""What a replica runs, so that only replicas of the same kind answer as one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from radixkv.sampling_defaults import as_sampling_defaults

# What `radixkv.cluster.describe` writes of a replica, with the types that JSON leaves them.
_IDENTITY: Mapping[str, type] = {
    "version": str,
    "model": str,
    "weights": str,
    "dtype": str,
    "max_model_len": int,
    "vocab_size": int,
    "eos_token_ids": list,
    "sampling_defaults": dict,
    "chat_template": str,
    "block_size": int,
    "block_bytes": int,
    "enable_prefix_caching": bool,
    "quantised_bytes": int,
}
_CAPACITY = ("num_blocks", "max_num_seqs", "max_num_batched_tokens")


@dataclass(frozen=True, slots=True)
class ReplicaDescription:
    """What a replica runs.

    Attributes:
        instance: another one each time that it is started.
        identity: what must be the same of all replicas, by its name: the model, its weights, the version, the options on
            which answers depend.
        capacity: ``num_blocks``, ``max_num_seqs`` and ``max_num_batched_tokens``, which may differ.
    """

    instance: str
    identity: Mapping[str, Any]
    capacity: Mapping[str, int]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ReplicaDescription:
        """What `as_json` gave.

        Raises:
            ValueError, TypeError, KeyError: something else.
        """
        description = cls(**{field.name: data[field.name] for field in fields(cls)})
        if not isinstance(description.identity, dict):
            raise TypeError(f"identity: expected an object, got {description.identity!r:.100}")
        for name in _CAPACITY:
            if type(description.capacity[name]) is not int:
                raise ValueError(f"{name}: expected a whole number, got {description.capacity[name]!r}")
        return description

    def check(self) -> None:
        """Refuse what others cannot be compared with.

        Raises:
            ValueError: a name is missing, its value is of another type, or nothing can be sampled with the defaults.
        """
        for name, kind in _IDENTITY.items():
            value = self.identity.get(name)
            if type(value) is not kind:
                raise ValueError(f"{name}: expected a value of type {kind.__name__}, got {value!r}")
        as_sampling_defaults(self.identity["sampling_defaults"])

    def as_json(self) -> dict[str, Any]:
        """As an object of JSON."""
        return asdict(self)

    def difference(self, other: ReplicaDescription) -> str | None:
        """The first thing in which another one differs, such as ``block_size: 16, and 32 there``; None: in nothing."""
        for name in [*self.identity, *other.identity]:
            here, there = self.identity.get(name), other.identity.get(name)
            if here != there:
                return f"{name}: {here!r}, and {there!r} there"
        return None
