"""Calls of the replicas' private interface that are no requests for answers, and checks of the responses."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import httpx

from radixkv.cluster.connection import SECONDS_TO_ANSWER
from radixkv.cluster.description import ReplicaDescription
from radixkv.errors import ReplicasLostError


class PendingCalls:
    """The calls that have no response yet: until they have, connections to a removed replica stay open.

    Args:
        headers: with the replicas' secret.
    """

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._headers = headers
        self._clients: dict[asyncio.Task[httpx.Response | None], httpx.AsyncClient | None] = {}

    def begin(
        self, client: httpx.AsyncClient | None, method: str, path: str, content: bytes
    ) -> asyncio.Task[httpx.Response | None]:
        """Begin a call; the result is None if the replica is down, and so has no client, or does not answer."""
        task = asyncio.ensure_future(self._call(client, method, path, content))
        self._clients[task] = client
        task.add_done_callback(self._clients.pop)
        return task

    def __contains__(self, client: httpx.AsyncClient) -> bool:
        """Whether a call of a replica is pending."""
        return client in self._clients.values()

    async def _call(
        self, client: httpx.AsyncClient | None, method: str, path: str, content: bytes
    ) -> httpx.Response | None:
        if client is None:
            return None
        try:
            return await client.request(method, path, content=content, headers=self._headers, timeout=SECONDS_TO_ANSWER)
        except (httpx.HTTPError, RuntimeError):  # RuntimeError: the client is closed
            return None


async def fetch_description(
    replica: object, client: httpx.AsyncClient, headers: Mapping[str, str], timeout: float
) -> ReplicaDescription:
    """What a replica says of itself within so many seconds.

    Raises:
        ConnectionError: it does not answer, or with something else.
    """
    try:
        answer = await client.get("/description", headers=headers, timeout=timeout)
        answer.raise_for_status()
        return ReplicaDescription.from_json(answer.json())
    except httpx.HTTPStatusError as error:
        raise ConnectionError(f"{replica}: {error.response.status_code} {error.response.text:.200}") from error
    except (httpx.HTTPError, ValueError, TypeError, KeyError) as error:
        raise ConnectionError(f"{replica}: {error!r}") from error


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
    """Why a call failed."""
    return "it does not answer" if answer is None else f"{answer.status_code} {answer.text:.300}"
