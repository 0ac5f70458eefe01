"""`POST /v1/responses` and `/v1/responses/input_tokens`, and what there is of `/v1/responses/{id}`."""

from __future__ import annotations

from dataclasses import replace
from http import HTTPStatus
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from radixkv.server.access.authentication import CurrentTenant
from radixkv.server.chat.events import chat_prompt, start_chat
from radixkv.server.chat.translated_chat import translate
from radixkv.server.errors import ApiError, client_errors
from radixkv.server.not_supported import Only
from radixkv.server.output.event_stream import named_events
from radixkv.server.output.respond import JsonResponse, cancel_on_disconnect, respond
from radixkv.server.responses.input_items import MAX_LISTED, InputItemList, listed_items, page_of
from radixkv.server.responses.objects import DeletedResponse, InputTokenCount, ResponseObject
from radixkv.server.responses.references import with_referenced_items
from radixkv.server.responses.request import InputTokensRequest, ResponseRequest
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

    def continued(body: InputTokensRequest, tenant: str) -> StoredResponse | None:
        """The response that a request continues."""
        if body.previous_response_id is None:
            return None
        return stored(tenant, body.previous_response_id, "previous_response_id")

    @router.post("", response_model=ResponseObject)
    async def respond_to(body: ResponseRequest, request: Request, tenant: CurrentTenant) -> Response:
        """Respond to an input, or go on from an earlier response."""
        service.check_model(body.model)
        earlier = continued(body, tenant.name)
        body, sources = with_referenced_items(body, store, tenant.name, earlier)
        messages = input_messages(body.input, earlier.messages if earlier else ())
        breakpoints = conversation_breakpoints(body, earlier)
        chat = translate(as_chat_request(body, messages), FIELD_NAMES)
        response_id = new_id("resp", "_")
        namespace = tenant.namespace(body.cache_salt)
        items = {} if body.store is False else listed_items(body.input)
        pending = store.begin(tenant.name, earlier, namespace, messages, breakpoints, items, sources)
        marked = [replace(each, messages=instructed(body, each.messages)) for each in breakpoints]
        with_logprobs = body.num_top_logprobs is not None
        starting = start_chat(service, chat, tenant, response_id, marked, locates_tokens=with_logprobs)
        events = await cancel_on_disconnect(request, starting)
        writer = ResponsesWriter(body, response_id, service, pending)
        return await respond(request, events, writer, bool(body.stream), named_events)

    @router.post("/input_tokens")
    async def count_input_tokens(body: InputTokensRequest, tenant: CurrentTenant) -> InputTokenCount:
        """Tokens of a prompt, without responding to it."""
        service.check_model(body.model)
        earlier = continued(body, tenant.name)
        body, _ = with_referenced_items(body, store, tenant.name, earlier)
        messages = input_messages(body.input, earlier.messages if earlier else ())
        chat = translate(as_chat_request(body, messages), FIELD_NAMES)
        with client_errors(chat.request_field_names):
            prompt = await chat_prompt(service, chat, tenant)
        return InputTokenCount(input_tokens=len(prompt.token_ids))

    @router.get("/{name}", response_model=ResponseObject)
    async def get_response(
        name: str,
        tenant: CurrentTenant,
        stream: Only[Literal["false", "False", "0"] | None] = None,
        starting_after: Only[None] = None,
    ) -> Response:
        """A response that is stored; whole, as its events are not."""
        return JsonResponse(stored(tenant.name, name, "id").response)

    @router.get("/{name}/input_items", response_model=InputItemList)
    async def list_input_items(
        name: str,
        tenant: CurrentTenant,
        limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
        before: Only[None] = None,
    ) -> Response:
        """The items that a response was generated from, those of the responses that it continues included."""
        return JsonResponse(page_of(stored(tenant.name, name, "id").input_items, limit, order, after))

    @router.delete("/{name}")
    async def delete_response(name: str, tenant: CurrentTenant) -> DeletedResponse:
        """Forget a response; those that continued it stay."""
        stored(tenant.name, name, "id")
        store.remove(tenant.name, name)
        return DeletedResponse(id=name)

    return router
