"""The contents of several replicas' caches as one document of JSON: a snapshot of each, by its name."""

from __future__ import annotations

import json
from collections.abc import Mapping

from radixkv.observe.inspect.snapshot import CacheSnapshot

FORMAT = "radixkv-replica-snapshots"


def join_snapshots(documents: Mapping[str, str]) -> str:
    """One document of those that `CacheSnapshot.to_json` wrote."""
    # They are large, so they are joined as text, without parsing them.
    replicas = ", ".join(f"{json.dumps(name)}: {document}" for name, document in documents.items())
    return f'{{"format": "{FORMAT}", "version": 1, "replicas": {{{replicas}}}}}'


def read_snapshots(text: str | bytes) -> dict[str | None, CacheSnapshot]:
    """What `join_snapshots` or `CacheSnapshot.to_json` wrote: by the replica's name, or under None that of one engine.

    Raises:
        ValueError: it is neither, or of another version.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected a snapshot of a cache, got no JSON: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        return {None: CacheSnapshot.from_fields(document)}
    if document.get("version") != 1 or not isinstance(document.get("replicas"), dict):
        raise ValueError(f"expected snapshots of caches ({FORMAT}, version 1), got version {document.get('version')!r}")
    return {name: CacheSnapshot.from_fields(each) for name, each in document["replicas"].items()}
