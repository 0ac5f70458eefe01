"""Keys of tenants, as a file has them and as clients send them."""

from __future__ import annotations

from typing import Any

from radixkv.server.keys import Key, hash_of


def entry(key: str, **fields: Any) -> Key:
    return Key(sha256=hash_of(key), **fields)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}
