"""Help as plain text: no name is cut off on a narrow terminal, and ``[ray]`` in a description is not taken for markup.

Errors of options and arguments have what was expected and the value.
"""

from __future__ import annotations

import inspect
from typing import Any

from typer import BadParameter
from typer.core import TyperCommand, TyperGroup


class PlainCommand(TyperCommand):
    """A command whose help lists its options under the names of their groups (``rich_help_panel``)."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                default = "Arguments" if parameter.param_type_name == "argument" else "Options"
                title = getattr(parameter, "rich_help_panel", None) or default
                sections.setdefault(title, []).append(record)
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)


class PlainGroup(TyperGroup):
    """A group whose help says of each command what the first paragraph of its own help says, in full."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BadParameter as error:
            error.message = _with_value(error)
            raise

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        rows = [
            (name, " ".join(inspect.cleandoc(command.help or "").partition("\n\n")[0].split()))
            for name, command in commands.items()
            if command is not None
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _with_value(error: BadParameter) -> str:
    """A message that also has the value, where pydantic refused it for Typer."""
    from pydantic import ValidationError  # only here, because --help is to be instant

    refused = error.__cause__
    if not isinstance(refused, ValidationError):
        return error.message
    (first, *_) = refused.errors()
    opening, found, expected = first["msg"].partition("Input should be ")
    if not found:
        return opening.removeprefix("Value error, ")  # of Typer's own, which has the value
    return f"expected {expected.partition(', unable to')[0]}, got {first['input']!r:.80}"
