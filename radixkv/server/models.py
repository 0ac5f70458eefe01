"""`GET /v1/models`, `GET /version` and `GET /health`."""

from __future__ import annotations

from http import HTTPStatus
from typing import Literal

from fastapi import APIRouter, Response
from pydantic import BaseModel

from radixkv import __version__
from radixkv.server.authentication import CurrentTenant
from radixkv.server.errors import ApiError
from radixkv.server.service import Service


class Model(BaseModel):
    """The model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "radixkv"
    max_model_len: int


class ModelList(BaseModel):
    """The list of models: one."""

    object: Literal["list"] = "list"
    data: list[Model]


class Version(BaseModel):
    """The server's version."""

    version: str


def model_routes(service: Service) -> APIRouter:
    """The endpoints; only those about the model need a key."""
    router = APIRouter()

    def model() -> Model:
        return Model(id=service.model_name, created=service.started, max_model_len=service.llm.loaded.max_model_len)

    @router.get("/v1/models", tags=["models"])
    async def list_models(tenant: CurrentTenant) -> ModelList:
        """The models that can be requested."""
        return ModelList(data=[model()])

    @router.get("/v1/models/{name:path}", tags=["models"])
    async def get_model(name: str, tenant: CurrentTenant) -> Model:
        """One model."""
        service.check_model(name)
        return model()

    @router.get("/version", tags=["observation"])
    async def version() -> Version:
        """The server's version."""
        return Version(version=__version__)

    @router.get("/health", tags=["observation"], response_class=Response)
    async def health() -> Response:
        """200 while new requests are accepted; 503 when draining or when the engine is dead."""
        if service.llm.death is not None:
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "the engine is dead", code="unavailable")
        if service.llm.draining:
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "the server is draining", code="unavailable")
        return Response()

    return router
