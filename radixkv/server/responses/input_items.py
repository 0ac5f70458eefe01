"""The items of a conversation as `GET /v1/responses/{id}/input_items` lists them, in pages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, Literal

from pydantic import BaseModel

from radixkv.server.chat.messages import RefusalPart
from radixkv.server.errors import ApiError
from radixkv.server.output.encoding import EncodedPart
from radixkv.server.responses.items import (
    FunctionCallOutputItem,
    InputImage,
    InputItem,
    InputText,
    MessageItem,
    OutputText,
    ReasoningItem,
)
from radixkv.server.service import new_id

MAX_LISTED = 100
# Of ids, by the type of the item.
_PREFIXES = MappingProxyType(
    {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
)


class EncodedItems(EncodedPart):
    """A list of items as JSON."""


class InputItemList(BaseModel):
    """A page of the items that a response was generated from; no ids: it has no items."""

    object: Literal["list"] = "list"
    data: EncodedItems
    first_id: str | None
    last_id: str | None
    has_more: bool


def listed_items(items: str | Sequence[InputItem]) -> dict[str, bytes]:
    """The items of a request's ``input`` as JSON, in order, by their ids: new ones where there are none, or one comes twice.

    Args:
        items: without references.
    """
    listed: dict[str, bytes] = {}
    for item in [MessageItem(role="user", content=items)] if isinstance(items, str) else items:
        name, fields = item.id, _fields(item)
        if not name or name in listed:
            name = new_id(_PREFIXES[item.type], "_")
        listed[name] = json.dumps({"id": name, "status": "completed", **fields}, ensure_ascii=False).encode()
    return listed


def page_of(items: Mapping[str, bytes], limit: int, order: Literal["asc", "desc"], after: str | None) -> InputItemList:
    """Some of a response's input items.

    Args:
        items: all of them, as JSON by their ids, the oldest first.
        limit: how many at most.
        order: ``desc``: the latest first.
        after: id of the item before the first one, in this order.

    Raises:
        ApiError: there is no such item.
    """
    names = list(items) if order == "asc" else list(items)[::-1]
    if after is not None and after not in items:
        raise ApiError(
            HTTPStatus.NOT_FOUND,
            f"after: expected the id of an item of this response's input, got {after!r:.80}",
            param="after",
            code="item_not_found",
        )
    begin = 0 if after is None else names.index(after) + 1
    shown = names[begin : begin + limit]
    return InputItemList(
        data=EncodedItems.of(b"[%b]" % b",".join(items[name] for name in shown)),
        first_id=shown[0] if shown else None,
        last_id=shown[-1] if shown else None,
        has_more=begin + limit < len(names),
    )


def _fields(item: InputItem) -> dict[str, Any]:
    """An item's fields, with all that OpenAI's answers have."""
    fields = item.model_dump(exclude_none=True, exclude={"id", "asynchronous"})
    match item:
        case MessageItem():
            fields["content"] = [_part(part, item.role == "assistant") for part in item.parts]
        case FunctionCallOutputItem() if not isinstance(item.output, str):
            fields["output"] = [_part(part, False) for part in item.parts]
        case ReasoningItem():
            fields.setdefault("summary", [])
            if item.content is not None:
                fields["content"] = [{"type": "reasoning_text", "text": part.text} for part in item.content]
    return fields


def _part(part: InputText | InputImage | OutputText | RefusalPart, is_answer: bool) -> dict[str, Any]:
    fields = part.model_dump(exclude_none=True)
    if isinstance(part, InputImage):
        return {"detail": "auto", **fields}
    if isinstance(part, RefusalPart):
        return fields
    return {**fields, **({"type": "output_text", "annotations": []} if is_answer else {"type": "input_text"})}
