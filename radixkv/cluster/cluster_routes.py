"""The server's routes about an engine, for all replicas: sums, or what each says."""

from __future__ import annotations

from http import HTTPStatus

from fastapi import APIRouter, Depends, Response
from pydantic import BaseModel

from radixkv.cluster.cluster_llm import ClusterLLM
from radixkv.cluster.load import ReplicaLoad
from radixkv.cluster.replica_calls import all_answers, failure
from radixkv.observe.inspect.replica_snapshots import join_snapshots
from radixkv.server.access.authentication import CurrentTenant, administrator
from radixkv.server.errors import ApiError
from radixkv.server.operation.admin import CheckResponse
from radixkv.server.operation.live_state import LiveState, live_state
from radixkv.server.service import Service


class ReplicaState(BaseModel):
    """One replica.

    Attributes:
        generation: a name for what it runs, the same for all that run the same; None: it is down.
        streams: of this ingress.
        running: requests of all ingresses.
        waiting: likewise.
        queued_tokens: of prompts, to be computed.
    """

    name: str
    up: bool
    draining: bool
    generation: str | None
    streams: int
    running: int
    waiting: int
    queued_tokens: int
    blocks: int
    cached_blocks: int


class ReplicaList(BaseModel):
    """All replicas."""

    replicas: list[ReplicaState]


class ClusterState(LiveState):
    """Everything on the page: sums, and the latest report of each replica."""

    replicas: list[ReplicaState]


def cluster_routes(service: Service, llm: ClusterLLM) -> APIRouter:
    """`/live` with totals and each replica, and the parts of `/admin` that mean something for several replicas."""
    router = APIRouter()
    admin = APIRouter(prefix="/admin", tags=["administration"], dependencies=[Depends(administrator)])

    @router.get("/live", tags=["observation"])
    async def live(tenant: CurrentTenant) -> ClusterState:
        """The sums over all replicas, and the latest report of each; what is cached, only the replicas know."""
        totals = live_state(service.model_name, llm.draining, llm.stats, llm.block_size, requests=[], trees=[])
        return ClusterState(**dict(totals), replicas=_states(llm))

    @admin.get("/replicas")
    async def replicas() -> ReplicaList:
        """The latest report of each replica."""
        return ReplicaList(replicas=_states(llm))

    @admin.get("/snapshot", response_class=Response)
    async def snapshots() -> Response:
        """All that each replica has cached, of every tenant, with texts, for `radixkv inspect`. No step runs meanwhile."""
        answers = all_answers(await llm.replicas.ask_all("GET", "/snapshot"))
        documents = {name: answer.text for name, answer in answers.items()}
        return Response(join_snapshots(documents), media_type="application/json")

    @admin.get("/replicas/{name:path}/snapshot", response_class=Response)
    async def snapshot(name: str) -> Response:
        """All that one replica has cached, of every tenant, with texts, for `radixkv inspect`. It runs no step meanwhile."""
        return await ask(name, "/snapshot")

    @admin.get("/replicas/{name:path}/metrics", response_class=Response)
    async def metrics(name: str) -> Response:
        """The metrics of one replica's engine, in Prometheus' text format."""
        return await ask(name, "/metrics")

    async def ask(name: str, path: str) -> Response:
        if name not in llm.replicas.names:
            raise ApiError(HTTPStatus.NOT_FOUND, f"there is no replica {name!r}")
        answer = await llm.replicas.ask(name, "GET", path)
        if answer is None or not answer.is_success:
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, f"replica {name!r}: {failure(answer)}")
        return Response(answer.content, media_type=answer.headers["content-type"])

    @admin.post("/check")
    async def check() -> CheckResponse:
        """Verify every rule of the bookkeeping of all caches that are up; 500: one is broken, 503: one does not answer."""
        up = set(llm.replicas.loads)
        if not up:
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "no replica is up")
        asked = await llm.replicas.ask_all("POST", "/check")
        answers = {name: answer for name, answer in asked.items() if name in up}
        broken = [
            f"replica {name!r}: {failure(answer)}"
            for name, answer in answers.items()
            if answer is not None and answer.status_code == HTTPStatus.INTERNAL_SERVER_ERROR
        ]
        if broken:
            raise ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "; ".join(broken))
        each = [CheckResponse(**answer.json()) for answer in all_answers(answers).values()]
        return CheckResponse(**{name: sum(getattr(one, name) for one in each) for name in CheckResponse.model_fields})

    router.include_router(admin)
    return router


def _states(llm: ClusterLLM) -> list[ReplicaState]:
    return [_state(llm, name) for name in llm.replicas.names]


def _state(llm: ClusterLLM, name: str) -> ReplicaState:
    load = llm.replicas.loads.get(name, ReplicaLoad())
    return ReplicaState(
        name=name,
        up=name in llm.replicas.available,
        draining=load.draining,
        generation=llm.replicas.generations.by_replica.get(name),
        streams=llm.replicas.streams.num_streams(name),
        running=load.num_running,
        waiting=load.num_waiting,
        queued_tokens=load.num_queued_tokens,
        blocks=load.num_blocks,
        cached_blocks=load.num_evictable_blocks,
    )
