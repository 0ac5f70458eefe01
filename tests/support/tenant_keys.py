"""Keys of tenants, as a file has them and as clients send them."""

from __future__ import annotations

from typing import Any

import httpx

from radixkv.server.access.keys import Key, hash_of


def entry(key: str, **fields: Any) -> Key:
    return Key(sha256=hash_of(key), **fields)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def tokens_left(client: httpx.AsyncClient, key: str) -> int:
    """How many tokens of its rate limit a key has left."""
    answer = await client.get("/v1/models", headers=bearer(key))
    return int(answer.headers["x-ratelimit-remaining-tokens"])
