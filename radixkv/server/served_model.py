"""The interface that the server needs of a model: an engine of its own, or several elsewhere that answer as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from radixkv.engine.clearing import Cleared, NamespaceSelection
from radixkv.engine.stats import EngineStats
from radixkv.errors import EngineDeadError
from radixkv.model.text_interface import TextInterface
from radixkv.observe.prompt_explanation import PromptExplanation
from radixkv.outputs import RequestMetrics
from radixkv.prompts import Prompt
from radixkv.sampling_params import BeamSearchParams, SamplingParams
from radixkv.scheduling.tenant_share import TenantShare
from radixkv.serving.request_stream import RequestStream

_T = TypeVar("_T")


class ServedModel(Protocol):
    """`AsyncLLM`, which documents each of these, or an object that stands for several engines."""

    on_step: Callable[[EngineStats], None] | None

    @property
    def loaded(self) -> TextInterface: ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def draining(self) -> bool: ...

    @property
    def death(self) -> EngineDeadError | None: ...

    @property
    def seconds_in_step(self) -> float: ...

    @property
    def num_slots_taken(self) -> int: ...

    def coming_in(self) -> AbstractContextManager[None]: ...

    async def submit(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | BeamSearchParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        times: Sequence[RequestMetrics] | None = None,
    ) -> list[RequestStream]: ...

    def fail(self, request_id: str, error: Exception) -> None: ...

    async def keep(self, tenant: str, namespace: str, token_ids: Sequence[int], ttl: float) -> int: ...

    async def clear(self, selection: NamespaceSelection) -> Cleared: ...

    async def explain_prompts(self, prompts: Sequence[Prompt], *, tenant: str = "") -> list[PromptExplanation]: ...

    async def run_tokenizer(
        self, function: Callable[[TextInterface], _T], *, tenant: str = "", num_slots: int = 1
    ) -> _T: ...

    async def set_tenants(self, tenants: Mapping[str, TenantShare]) -> None: ...

    async def wait_for_death(self) -> EngineDeadError: ...

    def start_draining(self) -> None: ...

    async def shutdown(self, grace_seconds: float = 0.0) -> bool: ...
