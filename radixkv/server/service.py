"""What all routes share."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

from radixkv.async_llm import AsyncLLM
from radixkv.errors import PromptTooLongError
from radixkv.model.loader import LoadedModel
from radixkv.prompts import Prompt
from radixkv.server.errors import ApiError
from radixkv.server.metrics import ServerMetrics
from radixkv.server.protocol import GenerationRequest
from radixkv.server.tenants import Tenant, Tenants
from radixkv.server.token_text import TokenTexts


@dataclass(frozen=True)
class Service:
    """One model, served.

    Attributes:
        model_name: by what name requests ask for the model.
        started: when, in seconds since 1970.
        max_characters: of a text that could fit into the model; a longer one is not worth the time to tokenize it.
        drain: begins what SIGTERM begins: refuse new work, finish the rest, leave.
    """

    llm: AsyncLLM
    model_name: str
    tenants: Tenants
    metrics: ServerMetrics
    token_texts: TokenTexts
    max_characters: int
    started: int
    drain: Callable[[], None]

    def check_model(self, name: str | None) -> None:
        """Refuse requests for another model.

        Raises:
            ApiError: 404.
        """
        if name not in (None, self.model_name):
            raise ApiError(
                HTTPStatus.NOT_FOUND,
                f"model: {name!r} is not served here, {self.model_name!r} is",
                param="model",
                code="model_not_found",
            )

    def check_length(self, name: str, *texts: str) -> None:
        """Refuse texts that cannot fit into the model, before they are tokenized.

        Raises:
            PromptTooLongError: with the figures.
        """
        num_characters = sum(len(text) for text in texts)
        if num_characters > self.max_characters:
            raise PromptTooLongError(
                f"{name}: {num_characters} characters cannot fit into the model's {self.llm.loaded.max_model_len} tokens"
            )

    def with_cache_options(self, prompt: Prompt, request: GenerationRequest, tenant: Tenant) -> Prompt:
        """The prompt in the tenant's namespace, with what the request says of the cache."""
        return Prompt(
            prompt.token_ids,
            prompt.text,
            namespace=tenant.namespace(request.cache_salt),
            read_cache=request.cache is None or request.cache.read,
            write_cache=request.cache is None or request.cache.write,
        )

    def room_after(self, prompts: list[Prompt]) -> int:
        """Tokens that the model takes after the longest of the prompts."""
        return max(1, self.llm.loaded.max_model_len - max(len(prompt.token_ids) for prompt in prompts))


def max_characters(loaded: LoadedModel) -> int:
    """As many as there would be if every token were the longest."""
    return loaded.max_model_len * max(len(token) for token in loaded.require_tokenizer().get_vocab())


def new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"
