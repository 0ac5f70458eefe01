"""`radixkv serve` as a command line, without a server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from typer.testing import CliRunner, Result

from radixkv.cli.main import app
from radixkv.server.config import ServerConfig

Serve = Callable[..., tuple[ServerConfig, dict[str, Any]]]


def command(*arguments: str, **environment: str) -> Result:
    """The result of ``radixkv serve ARGUMENTS`` where the environment has these variables, too."""
    return CliRunner().invoke(app, ["serve", *arguments], env={"COLUMNS": "200", "TERM": "dumb", **environment})
