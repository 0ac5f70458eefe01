"""Items of stored responses that a request names by their ids, instead of sending them again."""

from __future__ import annotations

from http import HTTPStatus
from typing import TypeVar

from pydantic import TypeAdapter

from radixkv.server.errors import ApiError
from radixkv.server.responses.items import InputItem, ItemReference
from radixkv.server.responses.request import InputTokensRequest
from radixkv.server.responses.store import ResponseStore, StoredResponse

_R = TypeVar("_R", bound=InputTokensRequest)

# A client may send an item of the output as it is.
_INPUT_ITEM: TypeAdapter[InputItem] = TypeAdapter(InputItem)


def with_referenced_items(
    body: _R, store: ResponseStore, tenant: str, earlier: StoredResponse | None
) -> tuple[_R, dict[str, StoredResponse]]:
    """A request that has the items themselves in place of references, and the responses whose items they are, by their ids.

    Args:
        earlier: the response that the request continues, if it continues one.

    Raises:
        ApiError: an item is not stored, is named twice, or is in the conversation of ``earlier``: so no request is longer
            than what it sends and what is stored.
    """
    items: list[InputItem] = []
    sources: dict[str, StoredResponse] = {}
    for index, item in enumerate(body.input if isinstance(body.input, list) else ()):
        if isinstance(item, ItemReference):
            if item.id in sources:
                raise ApiError(
                    HTTPStatus.BAD_REQUEST,
                    f"input.{index}.id: expected each item once, got {item.id!r:.80} twice",
                    param="input",
                )
            if earlier is not None and item.id in earlier.item_ids:
                raise ApiError(
                    HTTPStatus.BAD_REQUEST,
                    f"input.{index}.id: expected each item once, got {item.id!r:.80}, which previous_response_id brings",
                    param="input",
                )
            found = store.item(tenant, item.id)
            if found is None:
                raise ApiError(
                    HTTPStatus.NOT_FOUND,
                    f"input.{index}.id: no item {item.id!r:.80} is stored: its response was sent with store=false, was "
                    "deleted, belongs to another client, or was displaced by later ones",
                    param="input",
                    code="item_not_found",
                )
            output, sources[item.id] = found
            item = _INPUT_ITEM.validate_python(output.model_dump())
        items.append(item)
    return (body.model_copy(update={"input": items}) if sources else body), sources
