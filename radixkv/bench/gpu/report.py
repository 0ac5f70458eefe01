"""Rows of a GPU bench, kept as they are measured: GPU time is scarce, and a row should survive what fails after it."""

from __future__ import annotations

import gc
import json
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console, RenderableType

from radixkv.bench.common.figures import write_figures
from radixkv.bench.common.folders import without_folders
from radixkv.bench.gpu.timing import Limits, describe_gpu, measure_limits, require_gpu

Row = TypeVar("Row")


class UnavailableError(Exception):
    """What a row measures does not exist here, which is not a failure."""


class GpuReport:
    """What a bench has found so far.

    Args:
        console: where progress is printed.
        json_path: a file that is written anew after every row; None: none.
        machine: what the figures were measured on.
        limits: of the GPU, measured in the same run.
        only: leave out the rows whose name does not contain this; None: measure all.
        rows: those measured before, as in the file: they are kept, and not measured again.

    Attributes:
        machine: as given.
        limits: as given.
        failed: by a row's name, the error that it ended with.
        unavailable: by a row's name, why it cannot be measured here.
        tracebacks: by a row's name, where it failed.
    """

    def __init__(
        self,
        console: Console,
        json_path: Path | None,
        machine: dict[str, Any],
        limits: Limits,
        only: str | None = None,
        rows: Sequence[dict[str, Any]] = (),
    ) -> None:
        self.machine = machine
        self.limits = limits
        self.failed: dict[str, str] = {}
        self.unavailable: dict[str, str] = {}
        self.tracebacks: dict[str, str] = {}
        self._console = console
        self._json_path = json_path
        self._only = only or ""
        self._rows = list(rows)
        self._content = {
            "machine": machine,
            "limits": asdict(limits),
            "rows": self._rows,
            "failed": self.failed,
            "unavailable": self.unavailable,
            "tracebacks": self.tracebacks,
        }

    @classmethod
    def begin(cls, console: Console, json_path: Path | None, only: str | None, resume: bool = False) -> GpuReport:
        """A report about this machine's GPU, whose limits are measured now.

        Args:
            resume: keep the rows that ``json_path`` has already, if it is there.

        Raises:
            ValueError: there is no GPU, or the rows that are there were measured on another kind.
        """
        require_gpu()
        machine, rows = describe_gpu(), []
        if resume and json_path is not None and json_path.exists():
            before = json.loads(json_path.read_text())
            if before["machine"]["gpu"] != machine["gpu"]:
                raise ValueError(
                    f"--resume: {json_path} was measured on {before['machine']['gpu']}, not {machine['gpu']}"
                )
            rows = before["rows"]
        return cls(console, json_path, machine, measure_limits(), only, rows)

    def wants(self, name: str) -> bool:
        """Whether a row of this name is to be measured, and was not measured before."""
        return self._only in name and all(row["name"] != name for row in self._rows)

    def measure(self, name: str, work: Callable[[], Row]) -> Row | None:
        """Measure one row, a dataclass. None: not wanted, unavailable or failed; the reason is kept, and nothing raised."""
        if not self.wants(name):
            return None
        row = None
        with self.failing_alone(name):
            gc.collect()
            torch.cuda.empty_cache()
            try:
                row = work()
            except UnavailableError as why:
                self.unavailable[name] = str(why)
                self._console.print(f"{name} is unavailable: {why}")
                self.write()
        if row is not None:
            self.keep(name, row)
        return row

    def keep(self, name: str, row: object) -> None:
        """Keep a row, a dataclass, that was measured already, in place of an earlier one of its name."""
        figures = asdict(row)  # type: ignore[call-overload]
        self._rows[:] = [row for row in self._rows if row["name"] != name]
        self._rows.append({"name": name, **figures})
        # Plain lines: a spinner would take time from the host while it is measured.
        self._console.print(f"{name}: " + ", ".join(f"{key} {value:,.4g}" for key, value in figures.items()))
        self.write()

    @contextmanager
    def failing_alone(self, name: str) -> Iterator[None]:
        """A row, or the preparation of some: any error in it is kept under this name, and what follows goes on."""
        try:
            yield
        except Exception as error:
            self.failed[name] = f"{type(error).__name__}: {error}"
            self.tracebacks[name] = without_folders("".join(traceback.format_exception(error)))
            self._console.print(self.tracebacks[name], highlight=False)
            self._console.print(f"{name} failed: {self.failed[name]}", style="red")
            self.write()

    def end(self, *summary: RenderableType) -> bool:
        """Print a summary and what failed; returns whether nothing did.

        Raises:
            ValueError: no row's name contains what was asked for.
        """
        names = [*(row["name"] for row in self._rows), *self.unavailable]
        if not self.failed and not any(self._only in name for name in names):
            raise ValueError(f"--only: no row's name contains {self._only!r}")
        for part in summary:
            self._console.print(part)
        for name, error in self.failed.items():
            self._console.print(f"failed: {name}: {error}")
        for name, why in self.unavailable.items():
            self._console.print(f"unavailable: {name}: {why}")
        return not self.failed

    def write(self) -> None:
        """Write the file, if there is to be one, as it is now."""
        write_figures(self._json_path, self._content)
