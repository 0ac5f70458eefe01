"""Responses as JSON. Large parts, which are log-probabilities, are written as text by a thread, off the event loop.

64 answers of 512 tokens with the 20 likeliest each are 50 MB of JSON, and blocked the event loop for 13 s as pydantic models.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, TypeVar

from pydantic import BaseModel, PrivateAttr, model_serializer

_T = TypeVar("_T")

# Fewer are written in place: handing them to the thread and back takes as long.
_MAX_INLINE_ENTRIES = 256


class EncodedPart(BaseModel):
    """A part of a response that is JSON already; derive from this and from the model whose form it has."""

    _json: bytes = PrivateAttr(default=b"null")

    @classmethod
    def of(cls, encoded: bytes) -> Self:
        part = cls.model_construct()
        part._json = encoded
        return part

    @property
    def encoded(self) -> bytes:
        return self._json

    @model_serializer(mode="plain")
    def _serialize(self) -> Any:
        return json.loads(self._json)


class EncoderThread:
    """Writes the large parts of responses, one after the other."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="radixkv-responses")

    async def run(self, num_entries: int, write: Callable[[], _T]) -> _T:
        """The result of ``write``, which writes about ``num_entries`` log-probabilities."""
        if num_entries <= _MAX_INLINE_ENTRIES:
            return write()
        return await asyncio.get_running_loop().run_in_executor(self._executor, write)


def encode(response: BaseModel) -> bytes:
    """A response, or a chunk of one, as JSON; parts of it or of its ``choices`` that are JSON already are copied."""
    fields = vars(response)
    encoded = {name: value.encoded for name, value in fields.items() if isinstance(value, EncodedPart)}
    choices = fields.get("choices") or ()
    if any(isinstance(value, EncodedPart) for choice in choices for value in vars(choice).values()):
        encoded["choices"] = b"[%b]" % b",".join(encode(choice) for choice in choices)
    if not encoded:
        return response.model_dump_json().encode()
    rest = response.model_dump_json(exclude=set(encoded)).encode()
    return rest[:-1] + b"".join(b',"%b":%b' % (name.encode(), part) for name, part in encoded.items()) + b"}"
