"""Requests of other protocols as chat requests, whose errors name the field that the client sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import PrivateAttr, ValidationError

from radixkv.server.chat_request import ChatCompletionRequest
from radixkv.server.strict import StrictModel


class TranslatedChatRequest(ChatCompletionRequest):
    """A chat request that was made from another protocol's; `translate` makes it."""

    _field_names: Mapping[str, str] = PrivateAttr(default_factory=dict)

    @property
    def request_field_names(self) -> dict[str, str]:
        own = super().request_field_names
        return {**self._field_names, **{name: self._field_names.get(field, field) for name, field in own.items()}}


def same_fields(body: StrictModel, *names: str, **renamed: str) -> dict[str, Any]:
    """Fields of a chat request that another protocol's request has, too; those that are null there are left out.

    Args:
        names: of fields that have the same name.
        renamed: chat field to the other name that it has.
    """
    fields = {**{name: name for name in names}, **renamed}
    return {field: value for field, name in fields.items() if (value := getattr(body, name)) is not None}


def translate(chat: Mapping[str, Any], field_names: Mapping[str, str]) -> TranslatedChatRequest:
    """A chat request with these fields.

    Args:
        field_names: chat field to the field that it was made from, where the two differ.

    Raises:
        RequestValidationError: a value is impossible; the error names the client's field.
    """
    try:
        request = TranslatedChatRequest.model_validate(chat)
    except ValidationError as error:
        errors = [
            {**detail, "loc": ("body", field_names.get(str(detail["loc"][0]), detail["loc"][0]), *detail["loc"][1:])}
            for detail in error.errors(include_url=False)
        ]
        # The error handler looks in this body for the parts of an error's location.
        body = {field_names.get(name, name): value for name, value in chat.items()}
        raise RequestValidationError(errors, body=body) from error
    request._field_names = field_names
    return request
