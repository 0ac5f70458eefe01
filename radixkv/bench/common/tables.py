"""Tables of figures for the terminal, and the progress of the rows that fill them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

Row = TypeVar("Row")


def figure_table(*columns: str, title: str | None = None, num_labels: int = 1) -> Table:
    """A table without rows: ``num_labels`` columns of labels, to the left, and then columns of figures, to the right."""
    table = Table(title=title)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < num_labels else "right")
    return table


def in_progress(console: Console, rows: Sequence[Row], name: Callable[[Row], str]) -> Iterator[Row]:
    """Yields each row, and shows its name and how many are done while it is measured."""
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=len(rows))
        for row in rows:
            progress.update(task, description=name(row))
            yield row
            progress.advance(task)
