"""What a replica runs: whether it can answer the requests that others answer, and go on with what they have begun."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from types import MappingProxyType
from typing import Any

import xxhash

from radixkv.cache.arguments import is_number
from radixkv.sampling_defaults import as_sampling_defaults

# What `radixkv.cluster.describe` says of a replica, with the types that the values have after JSON.
_IDENTITY: Mapping[str, type] = MappingProxyType(
    {
        "version": str,
        "tokenizer": str,
        "model": str,
        "weights": str,
        "dtype": str,
        "model_length": int,
        "rope_factors": str,
        "vocab_size": int,
        "eos_token_ids": list,
        "sampling_defaults": dict,
        "chat_template": str,
        "block_size": int,
        "block_bytes": int,
        "enable_prefix_caching": bool,
        "quantised_bytes": int,
    }
)
_CAPACITY: Mapping[str, type] = MappingProxyType(
    {"max_model_len": int, "max_num_seqs": int, "max_num_batched_tokens": int}
)
# Replicas of one version that are equal in these make the same tokens of a prompt, and its blocks have the same hashes.
_OF_PROMPTS = ("tokenizer", "vocab_size", "block_size")


@dataclass(frozen=True, slots=True)
class ReplicaDescription:
    """What a replica runs.

    Attributes:
        instance: a name that differs each time the replica is started.
        started: when that was, by the monotonic clock of this process. It is sent as an age: clocks of hosts differ.
        identity: what answers depend on, by name: the version, the model, its weights, the options of the engine.
            Replicas that are equal in all of it are of one generation.
        capacity: ``max_model_len`` (less than the identity's ``model_length`` where the pool is smaller), ``max_num_seqs``
            and ``max_num_batched_tokens``. No answer depends on these: an ingress asks for none longer than fits on each.
        chat_template: of its tokenizer, Jinja, or several by name; None: it has none. The identity has the digest of it.
    """

    instance: str
    started: float
    identity: Mapping[str, Any]
    capacity: Mapping[str, int]
    chat_template: str | Mapping[str, str] | None

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ReplicaDescription:
        """What `as_json` gave.

        Raises:
            ValueError, TypeError, KeyError: a value is missing, of another type or too low, or the defaults are impossible.
        """
        age = data["age"]
        if not (is_number(age) and 0 <= age < math.inf):
            raise ValueError(f"age: expected seconds, got {age!r:.100}")
        values = {**data, "started": time.monotonic() - age}
        description = cls(**{field.name: values[field.name] for field in fields(cls)})
        if not isinstance(description.instance, str):
            raise TypeError(f"instance: expected a name, got {description.instance!r:.100}")
        for part, kinds in (("identity", _IDENTITY), ("capacity", _CAPACITY)):
            values = data[part]
            if not isinstance(values, dict):
                raise TypeError(f"{part}: expected an object, got {values!r:.100}")
            for name, kind in kinds.items():
                if type(values.get(name)) is not kind:
                    raise ValueError(f"{name}: expected a value of type {kind.__name__}, got {values.get(name)!r:.100}")
        for name, of in (("block_size", description.identity), ("max_model_len", description.capacity)):
            if of[name] < 1:
                raise ValueError(f"{name}: expected at least 1, got {of[name]}")
        as_sampling_defaults(description.identity["sampling_defaults"])
        template = description.chat_template
        texts = template.values() if isinstance(template, dict) else () if template is None else (template,)
        if not all(isinstance(text, str) for text in texts):
            raise TypeError(f"chat_template: expected a text, texts by name, or null, got {template!r:.100}")
        return description

    def as_json(self) -> dict[str, Any]:
        """As an object of JSON."""
        values = asdict(self)
        age = time.monotonic() - values.pop("started")
        return {**values, "age": age}

    @property
    def generation(self) -> str:
        """A name for what it runs, equal for all replicas that run the same: 8 digits of a hash."""
        return xxhash.xxh3_64_hexdigest(json.dumps(self.identity, sort_keys=True).encode())[:8]

    @property
    def room(self) -> float:
        """Tokens of a sequence that fit into its pool; infinite where the pool has room for the model's whole length."""
        length = self.capacity["max_model_len"]
        return math.inf if length >= self.identity["model_length"] else length

    def difference(self, other: ReplicaDescription) -> str | None:
        """The first thing that differs, such as ``dtype: 'float32', and 'bfloat16' there``; None: nothing does."""
        return self._difference(other, [*self.identity, *other.identity])

    def difference_in_prompts(self, other: ReplicaDescription) -> str | None:
        """The first difference, likewise, that keeps the two from taking the same requests; None: they can take them."""
        return self._difference(other, _OF_PROMPTS)

    def _difference(self, other: ReplicaDescription, names: Sequence[str]) -> str | None:
        for name in names:
            here, there = self.identity.get(name), other.identity.get(name)
            if here != there:
                return f"{name}: {here!r}, and {there!r} there"
        return None
