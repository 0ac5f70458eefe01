"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import BaseModel, Field

from radixkv.model.text_interface import TextInterface
from radixkv.prompts import ChatOptions, as_chat_prompts, tokenize
from radixkv.sampling.detokenizer import decode_tokens
from radixkv.server.access.authentication import CurrentTenant
from radixkv.server.chat.messages import Messages, as_messages
from radixkv.server.chat.tool_protocol import ToolDefinitions
from radixkv.server.errors import client_errors
from radixkv.server.output.respond import JsonResponse
from radixkv.server.output.token_text import TokenTexts
from radixkv.server.service import Service
from radixkv.server.strict import StrictModel
from radixkv.tools.definitions import as_tool_options

# So that refusing a request takes little time; the model's length bounds what is accepted.
_MAX_TOKENS = 1 << 20


class TokenizeRequest(StrictModel):
    """Either ``prompt`` or ``messages``, and options, which mean what they mean in completions; null selects the default."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    # By default to a prompt, and not to what the chat template wrote.
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: ToolDefinitions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class TokenizeResponse(BaseModel):
    """Token ids, their number, and the model's length."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(StrictModel):
    """Token ids to decode."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=_MAX_TOKENS)]


class DetokenizeResponse(BaseModel):
    """The tokens' text, special tokens included."""

    prompt: str


class TokenizerInfo(BaseModel):
    """What a client needs besides `/tokenize` in order to write prompts itself. (vLLM's endpoint; lm-eval uses it.)"""

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: str | None


def tokenization_routes(service: Service) -> APIRouter:
    """The endpoints."""
    router = APIRouter(tags=["tokens"])

    @router.post("/tokenize", response_model=TokenizeResponse)
    async def tokenize(body: TokenizeRequest, tenant: CurrentTenant) -> Response:
        """Turn a text, or a conversation as the chat template writes it, into token ids."""
        service.check_model(body.model)
        with client_errors():
            tokenize_body = _tokenizing(body, service)
            return await service.llm.run_tokenizer(
                lambda loaded: JsonResponse(_response(tokenize_body(loaded), body, loaded, service.token_texts)),
                tenant=tenant.name,
            )

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, tenant: CurrentTenant) -> DetokenizeResponse:
        """Turn token ids into text."""
        service.check_model(body.model)
        with client_errors():
            service.check_num_tokens("tokens", len(body.tokens))
            text = await service.llm.run_tokenizer(lambda loaded: _decode(body, loaded), tenant=tenant.name)
        return DetokenizeResponse(prompt=text)

    @router.get("/tokenizer_info")
    async def tokenizer_info(tenant: CurrentTenant) -> TokenizerInfo:
        """The model's special tokens and its chat template."""
        tokenizer = service.llm.loaded.require_tokenizer()
        template = getattr(tokenizer, "chat_template", None)
        return TokenizerInfo(
            tokenizer_class=type(tokenizer).__name__,
            bos_token=tokenizer.bos_token,
            eos_token=tokenizer.eos_token,
            pad_token=tokenizer.pad_token,
            chat_template=template if isinstance(template, str) else None,
        )

    return router


def _tokenizing(body: TokenizeRequest, service: Service) -> Callable[[TextInterface], Sequence[int]]:
    """What turns the request's text or conversation into token ids. As in vLLM, a text ignores the options of conversations.

    Raises:
        TypeError, ValueError: it has neither or both, or one that cannot fit into the model, or an option is impossible.
    """
    match body.prompt, body.messages:
        case str(text), None:
            service.check_length("prompt", text)
            return partial(tokenize, "prompt", text, add_special_tokens=body.add_special_tokens is not False)
        case None, list(messages):
            options = ChatOptions(
                add_generation_prompt=body.add_generation_prompt is not False,
                continue_final_message=body.continue_final_message is True,
                tools=as_tool_options([tool.model_dump(exclude_none=True) for tool in body.tools or ()], None, None),
                chat_template_kwargs=body.chat_template_kwargs,
                add_special_tokens=body.add_special_tokens is True,
            )
            service.check_chat_length(messages, options)
            return lambda loaded: as_chat_prompts(as_messages(messages), loaded, options=options)[0].token_ids
    raise ValueError("prompt: expected either prompt or messages")


def _response(
    tokens: Sequence[int], body: TokenizeRequest, loaded: TextInterface, texts: TokenTexts
) -> TokenizeResponse:
    return TokenizeResponse(
        count=len(tokens),
        max_model_len=loaded.max_model_len,
        tokens=list(tokens),
        token_strs=[texts.text(token_id) for token_id in tokens] if body.return_token_strs else None,
    )


def _decode(body: DetokenizeRequest, loaded: TextInterface) -> str:
    tokenizer = loaded.require_tokenizer()
    for token_id in body.tokens:
        if token_id >= loaded.vocab_size:
            raise ValueError(f"tokens: {token_id} is outside the vocabulary of {loaded.vocab_size} tokens")
    return decode_tokens(tokenizer, body.tokens, skip_special_tokens=False)
