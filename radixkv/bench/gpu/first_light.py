"""Everything that must be known about a GPU on which RadixKV has not run yet, in order of importance.

GPU time is scarce. So each part runs in a process of its own, with a time limit: a crash, or a kernel that never ends, leaves
the other parts alone. Results are written to the file at once, and a run that was stopped can be resumed where it stopped.
"""

from __future__ import annotations

import json
import math
import signal
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from rich.console import Console

from radixkv.bench.common.figures import write_figures
from radixkv.bench.common.folders import without_folders
from radixkv.bench.gpu.part_process import PartProcess
from radixkv.bench.gpu.targets import next_steps

# No part is begun with less than this left of the time for all.
MIN_SECONDS = 30.0
# Reserved for the parent, to write the last figures.
_SPARE_SECONDS = 5.0

DONE, FAILED, TIMED_OUT, CUT_SHORT, SKIPPED = "done", "failed", "timed out", "cut short", "skipped"


@dataclass(frozen=True, slots=True)
class Part:
    """One command.

    Attributes:
        name: by which it is chosen.
        seconds: how long it may take.
        command: its arguments; ``{json}`` stands for the file that it writes, if it writes one.
        environment: variables that are set for it in addition to those that it inherits.
        missing: why it cannot run here; "": it can.
        advice: what to do where it fails.
        needed: whether no other part makes sense where it fails.
    """

    name: str
    seconds: float
    command: Sequence[str]
    advice: str
    environment: Mapping[str, str] = field(default_factory=dict)
    missing: str = ""
    needed: bool = False


class FirstLight:
    """One first light: runs its parts, and keeps what each gave in a file.

    Args:
        console: where progress is printed.
        json_path: the file, rewritten with every new result; None: none.
        clock: seconds.
    """

    def __init__(self, console: Console, json_path: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._json_path = json_path
        self._clock = clock
        self._start = clock()
        self._seconds_before = 0.0
        self._to_run_again: set[str] = set()
        self._total_seconds = math.inf
        self.termination = _Termination()
        self.results: dict[str, dict[str, Any]] = {}

    def resume(self) -> None:
        """Take over the results in the file, if it exists."""
        if self._json_path is not None and self._json_path.exists():
            before = json.loads(self._json_path.read_text())
            self.results, self._seconds_before = before["parts"], before.get("seconds", 0.0)

    def run(
        self, parts: Sequence[Part], minutes: float, total_minutes: float = math.inf, again: Collection[str] = ()
    ) -> bool:
        """Run the parts that have not run before, and needed ones that are not done; those that were cut short continue.

        Args:
            minutes: for this run.
            total_minutes: for this run and the earlier ones that it resumes.
            again: names of parts that run even if they have run before. What they gave before is kept until they begin.

        Returns:
            Whether all were reached; False: the time was over, a needed part failed, or a process could not be ended.
        """
        self._total_seconds = 60 * total_minutes
        self._write()  # if the file cannot be written, this shows before any time is spent
        end = self._start + min(60 * minutes, self._total_seconds - self._seconds_before)
        self._to_run_again = {name for name in again if self._status(name) not in (None, CUT_SHORT)}
        for number, part in enumerate(parts, start=1):
            status = self._status(part.name)
            is_over = status == DONE or (status not in (None, CUT_SHORT) and not part.needed)
            if is_over and part.name not in self._to_run_again:
                self._console.print(f"{part.name}: {status} before")
                continue
            left = end - self._clock() - _SPARE_SECONDS
            if left < MIN_SECONDS:
                return False
            if part.name in self._to_run_again:
                self._to_run_again.remove(part.name)
                del self.results[part.name]
            self._console.rule(f"{number}/{len(parts)} {part.name}")
            self._run(part, left)
            status = self.results[part.name]["status"]
            if status == CUT_SHORT or (part.needed and status != DONE) or self.results[part.name].get("still_running"):
                return False
        return True

    @property
    def _seconds(self) -> float:
        """Spent by this run and the earlier ones that it resumes."""
        return self._seconds_before + self._clock() - self._start

    def _status(self, name: str) -> str | None:
        status: str | None = self.results.get(name, {}).get("status")
        return status

    def report(self, parts: Sequence[Part]) -> list[str]:
        """What to do next, line by line; also in the file."""
        advice = {part.name: part.advice for part in parts}
        lines = []
        for name, result in self.results.items():
            if result["status"] in (FAILED, TIMED_OUT):
                lines.append(f"{name} {result['status']} after {result['seconds']:.0f} s: {advice.get(name, '')}")
        waiting = [p.name for p in parts if self._status(p.name) in (None, CUT_SHORT) or p.name in self._to_run_again]
        try:
            lines += next_steps({name: result.get("report", {}) for name, result in self.results.items()})
        except (KeyError, TypeError, ValueError) as error:  # a malformed file of a part; its figures are kept
            lines.append(f"what follows from the rows cannot be said: {type(error).__name__}: {error}")
        if waiting:
            spent = self._total_seconds - self._seconds < MIN_SECONDS + _SPARE_SECONDS
            how = "--resume and more --total-minutes" if spent else "--resume"
            lines.append(f"not finished: {', '.join(waiting)}: run again with {how}")
        self._write(lines)
        return lines

    def _run(self, part: Part, left: float) -> None:
        if part.missing:
            self._console.print(part.missing)
            self.results[part.name] = {"status": SKIPPED, "why": part.missing, "seconds": 0.0}
            self._write()
            return
        with tempfile.TemporaryDirectory() as folder:
            self._run_command(part, min(part.seconds, left), Path(folder) / "part.json")

    def _run_command(self, part: Part, limit: float, part_json: Path) -> None:
        result = {
            "status": CUT_SHORT,
            "command": [without_folders(argument) for argument in part.command],
            "seconds": 0.0,
        }
        before = self.results.get(part.name, {}).get("report")
        if before is not None:  # the part goes on with its own --resume
            part_json.write_text(json.dumps(before))
            result["report"] = before
        self.results[part.name] = result
        command = [part_json.as_posix() if argument == "{json}" else argument for argument in part.command]
        start = self._clock()
        self.termination.defer()
        try:
            process = PartProcess(self._console, command, part.environment)
        except OSError as error:  # there is no such program: the other parts have theirs
            result.update(status=FAILED, exit_status=None, last_lines=[without_folders(str(error))])
            self._write()
            self.termination.allow()
            return
        try:
            self.termination.allow()
            exit_status = process.wait(lambda: start + limit - self._clock(), lambda: self._take(result, part_json))
        finally:
            if not process.end():
                result["still_running"] = True
            result["seconds"] = round(self._clock() - start, 1)
            self._take(result, part_json)
        process.read_output()
        result["exit_status"] = exit_status
        if exit_status != 0:
            result["last_lines"] = [without_folders(line) for line in process.last_lines]
        if exit_status is not None:
            result["status"] = DONE if exit_status == 0 else FAILED
        elif limit == part.seconds:
            result["status"] = TIMED_OUT
        self._take(result, part_json)
        self._console.print(f"{part.name}: {result['status']}, {result['seconds']:.0f} s")

    def _take(self, result: dict[str, Any], part_json: Path) -> None:
        """Keep what the part has written so far."""
        with suppress(FileNotFoundError, json.JSONDecodeError):  # not yet, or just being written
            result["report"] = json.loads(part_json.read_text())
        self._write()

    def _write(self, lines: Sequence[str] = ()) -> None:
        content = {"seconds": round(self._seconds, 1), "parts": self.results, "next": list(lines)}
        write_figures(self._json_path, content)


class _Termination:
    """Inside this context SIGTERM raises `SystemExit`, so that the running part is ended, too, and does not keep the GPU."""

    def __init__(self) -> None:
        self._is_deferred = False
        self._has_come = False

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGTERM, self._receive)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def defer(self) -> None:
        """Until `allow`, only remember SIGTERM: raised while a process starts, it would leave one that nothing ends."""
        self._is_deferred = True

    def allow(self) -> None:
        self._is_deferred = False
        if self._has_come:
            raise SystemExit(128 + signal.SIGTERM)

    def _receive(self, number: int, frame: object) -> None:
        self._has_come = True
        if not self._is_deferred:
            self.allow()


def run_first_light(
    console: Console,
    json_path: Path | None,
    parts: Sequence[Part],
    *,
    minutes: float = 9.0,
    total_minutes: float = 30.0,
    resume: bool = False,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
) -> bool:
    """Run parts, and print what to do next.

    Args:
        json_path: where everything is kept.
        minutes: for this run.
        total_minutes: for this run and, by the file, the earlier ones that it resumes.
        resume: leave out the parts that have run by the file, and continue those that were cut short.
        only: names of the parts to run, even if they have run before; empty: all.
        skip: names of parts to leave out.

    Returns:
        Whether all parts are done, and none failed.

    Raises:
        ValueError: there is no part of such a name, or nothing to resume.
    """
    names = [part.name for part in parts]
    for option, given in (("--only", only), ("--skip", skip)):
        for name in given:
            if name not in names:
                raise ValueError(f"{option}: expected one of {', '.join(names)}, got {name!r}")
    if resume and json_path is None:
        raise ValueError("--resume: expected --json with the file of the earlier run")
    if json_path is not None and json_path.exists() and not resume:
        raise ValueError(f"--json: {json_path} is there already; --resume adds to it")
    light = FirstLight(console, json_path)
    if resume:
        light.resume()
    wanted = [part for part in parts if part.name not in skip and (not only or part.name in only)]
    with light.termination:
        complete = light.run(wanted, minutes, total_minutes, again=only)
    console.rule("what to do next")
    for line in light.report(wanted):
        console.print(f"- {line}", highlight=False)
    if json_path is not None:
        console.print(f"all of it is in {json_path}")
    return complete and all(light.results[part.name]["status"] in (DONE, SKIPPED) for part in wanted)
