"""State that all routes share."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from radixkv.errors import PromptTooLongError
from radixkv.prompts import ChatOptions, Prompt
from radixkv.server.access.rate_limits import RateLimits
from radixkv.server.access.tenants import Tenant, Tenants
from radixkv.server.chat.messages import ChatMessage
from radixkv.server.config import ServerConfig
from radixkv.server.errors import ApiError
from radixkv.server.operation.metrics import ServerMetrics
from radixkv.server.output.encoding import EncoderThread
from radixkv.server.output.token_text import TokenTexts
from radixkv.server.protocol import GenerationRequest
from radixkv.server.responses.store import ResponseStore
from radixkv.server.served_model import ServedModel
from radixkv.server.time_limits import Deadlines, TimeLimits

if TYPE_CHECKING:
    from radixkv.async_llm import AsyncLLM


@dataclass
class Service:
    """One served model.

    Attributes:
        config: the server's.
        tenants: who may use it.
        drain: starts what SIGTERM starts: refuse new requests, finish the unfinished ones, exit.
        unready_reason: returns why no request can be answered now, which /ready reports; None: they can be.
        engine: `llm`, where it is an engine of this process; None: several engines elsewhere answer.
        started: start time, in seconds since 1970.
        encoder: writes the large parts of responses.
        rate_limits: of tenants that have such limits.
        responses: that may be continued.
        max_token_characters: of the longest token: texts that could not fit into the model are refused untokenized.

    Raises:
        ValueError: the model has no tokenizer.
    """

    llm: ServedModel
    config: ServerConfig
    tenants: Tenants
    drain: Callable[[], None]
    unready_reason: Callable[[], str | None] = lambda: None
    engine: AsyncLLM | None = None
    started: int = field(default_factory=lambda: int(time.time()))
    encoder: EncoderThread = field(default_factory=EncoderThread)
    rate_limits: RateLimits = field(default_factory=RateLimits)
    responses: ResponseStore = field(default_factory=ResponseStore)
    metrics: ServerMetrics = field(init=False)
    token_texts: TokenTexts = field(init=False)
    max_token_characters: int = field(init=False)

    def __post_init__(self) -> None:
        tokenizer = self.llm.loaded.require_tokenizer()
        self.metrics = ServerMetrics(self.llm)
        self.token_texts = TokenTexts(tokenizer)
        self.max_token_characters = max_token_characters(tokenizer)

    @property
    def model_names(self) -> tuple[str, ...]:
        """All names by which requests select the model."""
        return self.config.served_model_name or (self.llm.loaded.name,)

    @property
    def model_name(self) -> str:
        """The first of them, by which answers call the model."""
        return self.model_names[0]

    @property
    def hides_prompts(self) -> bool:
        """Whether /live and explanations show no prompts: one tenant is shared by clients that may be different users."""
        return self.tenants.open_to_all and self.config.allow_unauthenticated

    def check_model(self, name: str | None) -> None:
        """Refuse requests for another model.

        Raises:
            ApiError: 404.
        """
        if name not in (None, *self.model_names):
            raise ApiError(
                HTTPStatus.NOT_FOUND,
                f"model: {name!r:.80} is not served here, {self.model_name!r} is",
                param="model",
                code="model_not_found",
            )

    def check_length(self, name: str, *texts: str) -> None:
        """Refuse texts that cannot fit into the model, before they are tokenized.

        Raises:
            PromptTooLongError: with the least number of tokens and the model's length.
        """
        self.check_num_tokens(name, sum(1 for text in texts if text), "texts")
        num_characters = sum(len(text) for text in texts)
        max_model_len = self.llm.loaded.max_model_len
        num_tokens = -(-num_characters // self.max_token_characters)
        if num_tokens > max_model_len:
            raise PromptTooLongError(
                f"{name}: at least {num_tokens} tokens > {max_model_len} maximum: {num_characters} characters, and a token "
                f"has at most {self.max_token_characters}; texts longer than that are not truncated either"
            )

    def check_chat_length(self, messages: Sequence[ChatMessage], options: ChatOptions) -> None:
        """Refuse a conversation that cannot fit into the model, before the chat template writes it.

        Args:
            options: with tools that the template describes, and variables that it may write.

        Raises:
            PromptTooLongError: see `check_length`.
        """
        self.check_length("messages", *(text for message in messages for text in message.texts))
        if options.tools is not None:
            self.check_length("tools", json.dumps(options.tools.definitions))
        if options.chat_template_kwargs:
            self.check_length("chat_template_kwargs", json.dumps(options.chat_template_kwargs))

    def check_num_tokens(self, name: str, count: int, what: str = "token ids") -> None:
        """Refuse more tokens, or texts of at least one token each, than fit into the model, before any work on them.

        Raises:
            PromptTooLongError: with the number and the model's length.
        """
        max_model_len = self.llm.loaded.max_model_len
        if count > max_model_len:
            raise PromptTooLongError(f"{name}: {count} {what} cannot fit into the model's {max_model_len} tokens")

    def deadlines(self, request: GenerationRequest) -> Deadlines:
        """Those of a request that arrives now."""
        config = self.config
        limits = TimeLimits(config.queue_timeout, config.first_token_timeout, config.request_timeout)
        return Deadlines(self.llm, limits.at_most(request.timeout), self.metrics)

    def with_cache_options(self, prompt: Prompt, request: GenerationRequest, tenant: Tenant) -> Prompt:
        """The prompt in the tenant's namespace, with the request's cache options."""
        return replace(
            prompt,
            namespace=tenant.namespace(request.cache_salt),
            read_cache=request.cache is None or request.cache.read,
            write_cache=request.cache is None or request.cache.write,
        )


def max_token_characters(tokenizer: Any) -> int:
    """The number of characters of the longest token."""
    return max(map(len, tokenizer.get_vocab()))


def new_id(prefix: str, separator: str = "-") -> str:
    return f"{prefix}{separator}{uuid.uuid4().hex}"


def response_id(request_id: str, body: GenerationRequest) -> str:
    """The id that a response shows. One that the client chose need not be unique, so the engine uses its own."""
    return request_id if body.request_id is None else f"{request_id.partition('-')[0]}-{body.request_id}"
