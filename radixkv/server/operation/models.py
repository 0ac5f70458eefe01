"""`GET /v1/models`, `GET /version`, `GET /load`, `GET /health` and `GET /ready`."""

from __future__ import annotations

from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from radixkv import __version__
from radixkv.server.access.authentication import CurrentTenant
from radixkv.server.errors import ERROR_STATUSES, ApiError, ErrorBody
from radixkv.server.messages.errors import MessagesError, is_anthropic_client
from radixkv.server.messages.objects import ModelInfo, ModelInfoPage
from radixkv.server.service import Service


class Model(BaseModel):
    """The model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "radixkv"
    max_model_len: int


class ModelList(BaseModel):
    """The model by each of its names."""

    object: Literal["list"] = "list"
    data: list[Model]


class Version(BaseModel):
    """The server's version."""

    version: str


class Load(BaseModel):
    """What the server has to do."""

    server_load: int


def model_routes(service: Service) -> APIRouter:
    """The endpoints; only those about the model need a key."""
    router = APIRouter()

    def model(name: str) -> Model:
        return Model(id=name, created=service.started, max_model_len=service.llm.loaded.max_model_len)

    def model_info(name: str) -> ModelInfo:
        created_at = datetime.fromtimestamp(service.started, UTC)
        length = service.llm.loaded.max_model_len
        return ModelInfo(id=name, display_name=name, created_at=created_at, max_input_tokens=length)

    errors: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorBody | MessagesError} for status in ERROR_STATUSES
    }

    @router.get("/v1/models", tags=["models"], responses=errors)
    async def list_models(request: Request, tenant: CurrentTenant) -> ModelList | ModelInfoPage:
        """The models that can be requested; in Anthropic's form for its clients."""
        names = service.model_names
        if not is_anthropic_client(request.headers):
            return ModelList(data=[model(name) for name in names])
        return ModelInfoPage(data=[model_info(name) for name in names], first_id=names[0], last_id=names[-1])

    @router.get("/v1/models/{name:path}", tags=["models"], responses=errors)
    async def get_model(name: str, request: Request, tenant: CurrentTenant) -> Model | ModelInfo:
        """One model; in Anthropic's form for its clients."""
        service.check_model(name)
        return model_info(name) if is_anthropic_client(request.headers) else model(name)

    @router.get("/version", tags=["observation"])
    async def version() -> Version:
        """The server's version."""
        return Version(version=__version__)

    def check_alive() -> None:
        if service.llm.death is not None:
            raise _unavailable("the engine is dead")
        if service.llm.seconds_in_step > service.config.step_timeout:
            limit = service.config.step_timeout
            raise _unavailable(f"the engine is stuck: its step has taken more than {limit:g} seconds")

    @router.get("/health", tags=["observation"], response_class=Response)
    async def health() -> Response:
        """Liveness: 200, also while draining; 503 when the engine is dead or stuck, and the process is about to end."""
        check_alive()
        return Response()

    # The path of AWS SageMaker's health checks; vLLM has it, too.
    router.add_api_route("/ping", health, methods=["GET", "POST"], include_in_schema=False)

    @router.get("/load", tags=["observation"])
    async def load(tenant: CurrentTenant) -> Load:
        """How many requests are unfinished. (vLLM's endpoint.)"""
        return Load(server_load=service.llm.num_slots_taken)

    @router.get("/ready", tags=["observation"], response_class=Response)
    async def ready() -> Response:
        """Readiness: 200 while new requests are accepted; 503 when draining, too."""
        check_alive()
        if service.llm.draining:
            raise _unavailable("the server is draining")
        unready_reason = service.unready_reason()
        if unready_reason is not None:
            raise _unavailable(unready_reason)
        return Response()

    return router


def _unavailable(why: str) -> ApiError:
    return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, why, code="unavailable")
