"""The command line: it parses and calls. Heavy imports wait until a command needs them, so that `--help` is instant."""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from radixkv import __version__
from radixkv.cli import bench, keys, store
from radixkv.cli.cluster import ingress, replica
from radixkv.cli.consoles import PlainConsole, discard_output
from radixkv.cli.exits import exit_unless
from radixkv.cli.generate import chat, generate
from radixkv.cli.observe import explain, inspect, simulate
from radixkv.cli.options import JsonPath
from radixkv.cli.plain_help import PlainCommand, PlainGroup
from radixkv.cli.serve import serve
from radixkv.cli.vllm_command import VllmCommand
from radixkv.cli.warm import warm


def demo(json_path: JsonPath = None) -> None:
    """Run a tour on the default model: what sharing saves, with equal answers."""
    from radixkv.cli.demo import run_demo

    exit_unless(run_demo(PlainConsole(), json_path))


def doctor(
    prepare: Annotated[bool, typer.Option("--prepare", help="convert the default model now, if it is not yet")] = False,
) -> None:
    """Check this machine and the installation, and report how to fix what is missing."""
    from radixkv.cli.doctor import report
    from radixkv.model.default_model import find_default_model
    from radixkv.model.gguf.conversion import ensure_converted

    console = PlainConsole()
    if prepare:
        ensure_converted(find_default_model(), console.print)
    report(console)


_COMMANDS: tuple[Callable[..., None], ...] = (
    chat,
    generate,
    serve,
    replica,
    ingress,
    demo,
    doctor,
    inspect,
    simulate,
    explain,
    warm,
)

app = typer.Typer(cls=PlainGroup, no_args_is_help=True, add_completion=False, rich_markup_mode=None)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def radixkv(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Prefix caching for language models."""


for command in _COMMANDS:
    app.command(cls=VllmCommand if command in (serve, replica) else PlainCommand)(command)
for name, commands in (("bench", bench.app), ("keys", keys.app), ("store", store.app)):
    app.add_typer(commands, name=name, cls=PlainGroup)


# As shells report a program that ended because nobody read its output any more.
_UNREAD = 128 + signal.SIGPIPE


def main() -> None:
    """Run a command; an error that a user can fix is one line on standard error, not a traceback.

    If the reader of a pipe leaves, a command ends without a message.
    """
    # Models write any character; a terminal that cannot show one shows its escape sequence.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            app()
        except SystemExit:  # Typer and rich end the program themselves
            _flush_output()
            raise
    except SystemExit as end:
        raise SystemExit(_UNREAD if isinstance(end.__context__, BrokenPipeError) else end.code) from None
    except BrokenPipeError:
        discard_output()
        raise SystemExit(_UNREAD) from None
    except (ValueError, TypeError, OSError, MemoryError, ImportError) as error:
        _fail(error)
    except Exception as error:
        # Imported only here: it imports the cache, for which `--help` and a mistyped option should not wait.
        from radixkv.errors import EngineError

        if not isinstance(error, EngineError):
            raise
        _fail(error)


def _fail(error: Exception) -> None:
    words = str(error) or type(error).__name__  # Python says no more of a lack of memory
    if isinstance(error, OSError) and error.filename is not None and error.filename2 is None:
        words = f"{error.filename}: {error.strerror}"
    print(f"radixkv: {words}", file=sys.stderr)
    try:
        _flush_output()
    except OSError:  # Python would try again at its end, and take the failure of that for the program's
        discard_output()
    raise SystemExit(1) from None


def _flush_output() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()
