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


def encode_response(response: BaseModel) -> bytes:
    """A response, or a chunk of one, as JSON; parts of it, at whatever depth, that are JSON already are copied."""
    return _with_encoded_parts(response) or response.model_dump_json().encode()


def _with_encoded_parts(value: Any) -> bytes | None:
    """A value as JSON, if it is JSON already, or a part of it is; None: neither."""
    if isinstance(value, EncodedPart):
        return value.encoded
    if isinstance(value, BaseModel):
        parts = {name: part for name, field in vars(value).items() if (part := _with_encoded_parts(field)) is not None}
        if not parts:
            return None
        rest = value.model_dump_json(exclude=set(parts)).encode()
        fields = [] if rest == b"{}" else [rest[1:-1]]
        return b"{%b}" % b",".join([*fields, *(b'"%b":%b' % (name.encode(), part) for name, part in parts.items())])
    # A list of models; others, such as that of a million token ids, are not looked through.
    if isinstance(value, list) and value and isinstance(value[0], BaseModel):
        entries = [_with_encoded_parts(entry) for entry in value]
        if any(entry is not None for entry in entries):
            whole = (entry or each.model_dump_json().encode() for entry, each in zip(entries, value, strict=True))
            return b"[%b]" % b",".join(whole)
    return None
