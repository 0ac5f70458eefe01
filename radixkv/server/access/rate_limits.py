"""Requests and tokens per minute: token buckets, one of each for a key that has such limits.

A bucket holds one minute's amount and refills steadily. When a request arrives, it takes the most that it may use, its prompt
and ``max_tokens`` per sequence; at its end, it returns what it did not use. So no burst of requests exceeds the limit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from radixkv.sampling_params import BeamSearchParams, SamplingParams
from radixkv.server.access.tenants import Tenant
from radixkv.server.errors import ApiError

_LIMITED = ("requests", "tokens")
# What a response says of each limit: the amount a minute, what is left of it, and how long until all of it is there again.
_PARTS = ("limit", "remaining", "reset")
RATE_LIMIT_HEADERS = tuple(f"x-ratelimit-{part}-{name}" for name in _LIMITED for part in _PARTS)


class TokenBucket:
    """Allows an amount per minute, and no more than that at once."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._filled_at = clock()

    @property
    def level(self) -> float:
        """What can be taken now; negative where more was used than had been taken."""
        now = self._clock()
        self._level = min(self.per_minute, self._level + (now - self._filled_at) * self.per_minute / 60)
        self._filled_at = now
        return self._level

    def change(self, per_minute: int) -> None:
        """Change the amount per minute; the bucket keeps its level as a fraction of its size."""
        self._level = self.level * per_minute / self.per_minute
        self.per_minute = per_minute

    def seconds_until(self, amount: float) -> float:
        """How long until ``amount`` can be taken; 0: now."""
        return max(0.0, (amount - self.level) * 60 / self.per_minute)

    def take(self, amount: float) -> None:
        """Take ``amount``, or put it back where it is negative."""
        self._level = min(self.per_minute, self.level - amount)


@dataclass
class Reservation:
    """What was taken for one request.

    Attributes:
        requests: the bucket from which one request was taken; None: the tenant has no such limit.
        tokens: the bucket from which ``num_tokens`` were taken; None: there is no such limit, or they are settled.
    """

    requests: TokenBucket | None
    tokens: TokenBucket | None
    num_tokens: int

    def settle(self, num_used: int) -> None:
        """Put back the tokens that were not used; later calls do nothing."""
        if self.tokens is not None:
            self.tokens.take(num_used - self.num_tokens)
            self.tokens = None

    def cancel(self) -> None:
        """Put back everything: the request was refused after all."""
        if self.requests is not None:
            self.requests.take(-1)
        self.settle(0)


class RateLimits:
    """The buckets of all tenants."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # By tenant and "requests" or "tokens".
        self._buckets: dict[tuple[str, str], TokenBucket] = {}

    def admit(
        self, tenant: Tenant, params: SamplingParams | BeamSearchParams, prompt_lengths: list[int], max_model_len: int
    ) -> Reservation:
        """Count a request, or refuse it and count nothing.

        Args:
            prompt_lengths: tokens of each prompt.
            max_model_len: tokens of prompt and answer together, at most.

        Raises:
            ValueError: it asks for more tokens than the tenant may have in an answer.
            ApiError: 429, with the seconds to wait.
        """
        limit = _answer_limit(tenant)
        for name in ("max_tokens", "min_tokens"):
            asked = getattr(params, name, None)
            if limit is not None and asked is not None and asked > limit:
                raise ValueError(f"{name}: expected at most {limit}, the key's limit, got {asked}")
        most = max_model_len if params.max_tokens is None else params.max_tokens
        num_seqs = params.n if isinstance(params, SamplingParams) else params.beam_width
        # A prompt that is too long is refused elsewhere.
        num_tokens = sum(length + num_seqs * max(0, min(most, max_model_len - length)) for length in prompt_lengths)
        requests, tokens = (self._bucket(tenant, name) for name in _LIMITED)
        if tokens is not None:
            num_tokens = min(num_tokens, tokens.per_minute)
        for bucket, name, amount in ((requests, "requests", 1), (tokens, "tokens", num_tokens)):
            if bucket is not None and (seconds := bucket.seconds_until(amount)) > 0:
                raise ApiError(
                    HTTPStatus.TOO_MANY_REQUESTS,
                    f"this key may have {bucket.per_minute} {name} a minute, and this request takes {amount}; "
                    f"try again in {math.ceil(seconds)} s",
                    code="rate_limit_exceeded",
                    headers={"Retry-After": f"{math.ceil(seconds)}"},
                )
        if requests is not None:
            requests.take(1)
        if tokens is not None:
            tokens.take(num_tokens)
        return Reservation(requests, tokens, num_tokens)

    def headers(self, tenant: Tenant) -> dict[str, str]:
        """The tenant's limits and what is left of them, as OpenAI's clients know them; none where it has no limits."""
        headers: dict[str, str] = {}
        for name in _LIMITED:
            bucket = self._bucket(tenant, name)
            if bucket is not None:
                left, reset = max(0, math.floor(bucket.level)), _duration(bucket.seconds_until(bucket.per_minute))
                values = (f"{bucket.per_minute}", f"{left}", reset)
                headers |= {f"x-ratelimit-{part}-{name}": value for part, value in zip(_PARTS, values, strict=True)}
        return headers

    def _bucket(self, tenant: Tenant, name: str) -> TokenBucket | None:
        """The tenant's bucket; None: it has no such limit.

        A tenant keeps its bucket when its limits change: a request from before the keys were reread still has the old limits,
        and would otherwise get a new bucket, which is full.
        """
        per_minute: int | None = None if tenant.key is None else getattr(tenant.key, f"{name}_per_minute")
        if per_minute is None:
            return None
        bucket = self._buckets.get((tenant.name, name))
        if bucket is None:
            bucket = self._buckets[tenant.name, name] = TokenBucket(per_minute, self._clock)
        elif bucket.per_minute != per_minute:
            bucket.change(per_minute)
        return bucket


def default_max_tokens(default: int | None, min_tokens: int, tenant: Tenant) -> int | None:
    """How many tokens an answer may have where its request does not say; None: as many as there is room for.

    Args:
        default: the endpoint's or the model's, if it has one.
        min_tokens: the least that the request asks for.
        tenant: whose key may limit it.
    """
    limit = _answer_limit(tenant)
    if default is None:
        return limit
    wanted = max(default, min_tokens)
    return wanted if limit is None else min(wanted, limit)


def _answer_limit(tenant: Tenant) -> int | None:
    return None if tenant.key is None else tenant.key.max_tokens


class RateLimitHeaders:
    """ASGI middleware, inside of authentication: adds headers with what is left of a tenant's limits to its responses."""

    def __init__(self, app: ASGIApp, limits: RateLimits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant: Tenant | None = scope.get("state", {}).get("tenant")
        if tenant is None or tenant.key is None:
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self._limits.headers(tenant))
            await send(message)

        await self._app(scope, receive, send_with_headers)


def _duration(seconds: float) -> str:
    """As OpenAI writes it: 250ms, 1.5s, 6m0s."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes}m{rest // 1000}s" if minutes else f"{rest / 1000:g}s"
