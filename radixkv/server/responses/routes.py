"""`POST /v1/responses`, and `GET` and `DELETE /v1/responses/{id}`."""

from __future__ import annotations

from dataclasses import replace
from http import HTTPStatus
from typing import Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response

from radixkv.server.authentication import CurrentTenant
from radixkv.server.chat_events import start_chat
from radixkv.server.errors import ApiError
from radixkv.server.named_events import named_events
from radixkv.server.not_supported import Only
from radixkv.server.respond import cancel_on_disconnect, respond
from radixkv.server.responses.objects import DeletedResponse, ResponseObject
from radixkv.server.responses.request import ResponseRequest
from radixkv.server.responses.store import StoredResponse
from radixkv.server.responses.translation import (
    FIELD_NAMES,
    as_chat_request,
    conversation_breakpoints,
    input_messages,
    instructed,
)
from radixkv.server.responses.writer import ResponsesWriter
from radixkv.server.service import Service, new_id
from radixkv.server.translated_chat import translate


def response_routes(service: Service) -> APIRouter:
    """The endpoints."""
    router = APIRouter(prefix="/v1/responses", tags=["generation"])
    store = service.responses

    def stored(tenant: str, response_id: str, param: str) -> StoredResponse:
        found = store.get(tenant, response_id)
        if found is None:
            raise ApiError(
                HTTPStatus.NOT_FOUND,
                f"{param}: no response {response_id!r:.80} is stored: it was sent with store=false, was deleted, "
                "belongs to another client, or was displaced by later ones",
                param=param,
                code="response_not_found",
            )
        return found

    @router.post("", response_model=ResponseObject)
    async def respond_to(body: ResponseRequest, request: Request, tenant: CurrentTenant) -> Response:
        """Respond to an input, or go on from an earlier response."""
        service.check_model(body.model)
        earlier = None
        if body.previous_response_id is not None:
            earlier = stored(tenant.name, body.previous_response_id, "previous_response_id")
        messages = input_messages(body.input, earlier.messages if earlier else ())
        breakpoints = conversation_breakpoints(body, earlier)
        chat = translate(as_chat_request(body, messages), FIELD_NAMES)
        response_id = new_id("resp", "_")
        pending = store.begin(tenant.name, earlier, tenant.namespace(body.cache_salt), messages, breakpoints)
        marked = [replace(each, messages=instructed(body, each.messages)) for each in breakpoints]
        events = await cancel_on_disconnect(request, start_chat(service, chat, tenant, response_id, marked))
        defaults = service.llm.loaded.sampling_defaults
        writer = ResponsesWriter(body, response_id, service.model_name, defaults, store, pending)
        return await respond(request, events, writer, bool(body.stream), named_events)

    @router.get("/{name}")
    async def get_response(
        name: str,
        tenant: CurrentTenant,
        stream: Only[Literal["false", "False", "0"] | None] = None,
        starting_after: Only[None] = None,
    ) -> ResponseObject:
        """A response that is stored; whole, as its events are not."""
        return stored(tenant.name, name, "id").response

    @router.delete("/{name}")
    async def delete_response(name: str, tenant: CurrentTenant) -> DeletedResponse:
        """Forget a response; those that continued it stay."""
        stored(tenant.name, name, "id")
        store.remove(tenant.name, name)
        return DeletedResponse(id=name)

    return router
