"""Items of stored responses that a request names by their ids, instead of sending them again."""

from __future__ import annotations

from http import HTTPStatus
from typing import TypeVar

from pydantic import TypeAdapter

from radixkv.server.errors import ApiError
from radixkv.server.responses.items import InputItem, ItemReference
from radixkv.server.responses.objects import as_input
from radixkv.server.responses.request import InputTokensRequest
from radixkv.server.responses.store import ResponseStore, StoredResponse

_R = TypeVar("_R", bound=InputTokensRequest)

# A client may send an item of the output as it is.
_INPUT_ITEM: TypeAdapter[InputItem] = TypeAdapter(InputItem)


def with_referenced_items(
    body: _R, store: ResponseStore, tenant: str, earlier: StoredResponse | None
) -> tuple[_R, list[StoredResponse]]:
    """A request that has the items themselves in place of references, and the responses whose items they are.

    Args:
        earlier: the response that the request continues, if it continues one.

    Raises:
        ApiError: an item is not stored, is named twice, or is in the conversation of ``earlier``, also if it is sent whole
            with its id: so nothing is in the prompt twice, and no request is longer than what it sends and what is stored.
    """
    items: list[InputItem] = []
    sources: list[StoredResponse] = []
    sent, named = set[str](), set[str]()
    for index, item in enumerate(body.input if isinstance(body.input, list) else ()):
        name = item.id
        if earlier is not None and name in earlier.items:
            raise _repeated(index, name, ", which previous_response_id brings")
        if name in (sent if isinstance(item, ItemReference) else named):
            raise _repeated(index, name, " twice")
        if name:
            sent.add(name)
        if isinstance(item, ItemReference):
            found = store.item(tenant, item.id)
            if found is None:
                raise ApiError(
                    HTTPStatus.NOT_FOUND,
                    f"input.{index}.id: no item {item.id!r:.80} is stored: its response was sent with store=false, was "
                    "deleted, belongs to another client, or was displaced by later ones",
                    param="input",
                    code="item_not_found",
                )
            output, source = found
            sources.append(source)
            named.add(item.id)
            item = _INPUT_ITEM.validate_python(as_input(output))
        items.append(item)
    return (body.model_copy(update={"input": items}) if sources else body), sources


def _repeated(index: int, name: str | None, where: str) -> ApiError:
    message = f"input.{index}.id: expected each item once, got {name!r:.80}{where}"
    return ApiError(HTTPStatus.BAD_REQUEST, message, param="input")
