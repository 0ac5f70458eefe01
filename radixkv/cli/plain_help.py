"""Help as plain text: no name is cut off on a narrow terminal, and ``[ray]`` in a description is not taken for markup."""

from __future__ import annotations

import inspect
from typing import Any

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

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        rows = [
            (name, " ".join(inspect.cleandoc(command.help or "").partition("\n\n")[0].split()))
            for name, command in commands.items()
            if command is not None
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
