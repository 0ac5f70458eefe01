"""Errors of the server, as OpenAI's clients read them."""

from __future__ import annotations

from typing import Any

import httpx


def assert_error(response: httpx.Response, status: int, **expected: Any) -> None:
    """A response is an error in OpenAI's form, with this status and these fields."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert {name: error[name] for name in expected} == expected, error
