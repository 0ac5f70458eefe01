"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from radixkv.server.access.authentication import CurrentTenant
from radixkv.server.chat.events import chat_prompt, start_chat
from radixkv.server.chat.translated_chat import translate
from radixkv.server.errors import ERROR_STATUSES, client_errors
from radixkv.server.messages.errors import MessagesError
from radixkv.server.messages.objects import MessageObject, TokenCount
from radixkv.server.messages.output import Ping
from radixkv.server.messages.request import CountTokensRequest, MessagesRequest
from radixkv.server.messages.translation import as_chat_request, field_names
from radixkv.server.messages.writer import MessageWriter
from radixkv.server.output.event_stream import named_event, named_events
from radixkv.server.output.respond import cancel_on_disconnect, respond
from radixkv.server.service import Service, new_id


def message_routes(service: Service) -> APIRouter:
    """The endpoints."""
    router = APIRouter(
        prefix="/v1/messages",
        tags=["generation"],
        responses={code: {"model": MessagesError} for code in ERROR_STATUSES},
    )

    @router.post("", response_model=MessageObject)
    async def message(body: MessagesRequest, request: Request, tenant: CurrentTenant) -> Response:
        """Answer a conversation."""
        service.check_model(body.model)
        with client_errors():
            fields, breakpoints = as_chat_request(body)
        chat = translate(fields, field_names(body))
        message_id = new_id("msg", "_")
        starting = start_chat(service, chat, tenant, message_id, breakpoints, prompt_only=body.max_tokens == 0)
        events = await cancel_on_disconnect(request, starting)
        shows_thinking = body.thinking is None or body.thinking.display != "omitted"
        writer = MessageWriter(message_id, service.model_name, shows_thinking=shows_thinking)
        return await respond(request, events, writer, bool(body.stream), named_events, named_event(Ping()))

    @router.post("/count_tokens")
    async def count_tokens(body: CountTokensRequest, tenant: CurrentTenant) -> TokenCount:
        """Tokens of a prompt, without answering it."""
        service.check_model(body.model)
        with client_errors():
            chat = translate(as_chat_request(body)[0], field_names(body))
        with client_errors(chat.request_field_names):
            prompt = await chat_prompt(service, chat, tenant)
        return TokenCount(input_tokens=len(prompt.token_ids))

    return router
