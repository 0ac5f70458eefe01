"""Asks replicas, and judges their answers where all were asked the same; see `ReplicaSet.ask_all`."""

from __future__ import annotations

from collections.abc import Mapping

import httpx

from radixkv.cluster.connection import SECONDS_TO_ANSWER
from radixkv.errors import ReplicasLostError


async def ask(
    client: httpx.AsyncClient | None, method: str, path: str, content: bytes, headers: Mapping[str, str]
) -> httpx.Response | None:
    """What one replica answers; None: it is down, or does not answer.

    Args:
        client: of the replica; None: it is down.
        method: of HTTP.
        path: of `replica_app`.
        content: the body.
        headers: with the replicas' secret.
    """
    if client is None:
        return None
    try:
        return await client.request(method, path, content=content, headers=headers, timeout=SECONDS_TO_ANSWER)
    except (httpx.HTTPError, RuntimeError):  # RuntimeError: the client is closed
        return None


def all_answers(answers: Mapping[str, httpx.Response | None]) -> dict[str, httpx.Response]:
    """The answers, if every replica gave one.

    Args:
        answers: by the names of replicas; None for one that is down, or does not answer.

    Raises:
        ReplicasLostError: some gave none, or an error; the message names them. Or there is no replica.
    """
    if not answers:
        raise ReplicasLostError("there is no replica")
    succeeded = {name: answer for name, answer in answers.items() if answer is not None and answer.is_success}
    if len(succeeded) < len(answers):
        missing = ", ".join(repr(name) for name in answers if name not in succeeded)
        raise ReplicasLostError(f"replicas that are down, or did not do it: {missing}; ask again")
    return succeeded


def failure(answer: httpx.Response | None) -> str:
    """Why a replica did not do what it was asked for."""
    return "it does not answer" if answer is None else f"{answer.status_code} {answer.text:.300}"
