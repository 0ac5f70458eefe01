"""Accepts command lines written for vLLM: how its options are written, and which of them RadixKV does not have."""

from __future__ import annotations

import json
import types
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import typer

from radixkv.cli.plain_help import PlainCommand
from radixkv.vllm_options import ENGINE, SERVER

_SHORT: Mapping[str, str] = types.MappingProxyType(
    {"-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size", "-dp": "--data-parallel-size"}
)
# vLLM takes several values after one of these options; here the option is repeated before each value.
_SEVERAL = ("--api-key", "--served-model-name")


class VllmCommand(PlainCommand):
    """A command that also takes command lines written for vLLM, except for options that cannot be fulfilled here."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {option for parameter in self.params for option in (*parameter.opts, *parameter.secondary_opts)}
        return super().parse_args(ctx, as_own_arguments(args, own))


def as_own_arguments(args: Iterable[str], own: Collection[str]) -> list[str]:
    """The command line without options that only vLLM has, and with the rest as it is written here.

    Args:
        args: as given: options may be written with underscores, and ``--model`` may stand before the model. Where it does, or
            the model comes first, several keys or names may follow one option.
        own: options of the command, such as ``--port``.

    Raises:
        ValueError: an option that only vLLM has asks for something other than what is done here; the message is one line.
    """
    rest = deque(args)
    kept: list[str] = []
    begins_with_model = bool(rest) and not rest[0].startswith("-")
    has_model = begins_with_model or any(word.partition("=")[0] == "--model" for word in rest)
    while rest:
        word = rest.popleft()
        if word == "--":
            return [*kept, word, *rest]
        if not word.startswith("-"):
            kept.append(word)
            continue
        option, equals, text = word.partition("=")
        value = text if equals else None
        option = _SHORT.get(option, option)
        if option.startswith("--"):
            option = option.replace("_", "-")
        if option in own:
            kept.append(option + equals + text)
            if option in _SEVERAL and has_model and rest:
                kept += [] if equals else [rest.popleft()]
                while rest and not rest[0].startswith("-"):
                    kept += [option, rest.popleft()]
        elif option == "--model":
            kept.append(_value(option, value, rest))
        elif option == "--allowed-origins" and "--cors-origin" in own:
            for origin in _origins(_value(option, value, rest)):
                kept += ["--cors-origin", origin]
        elif not _is_vllm_option(option, value, rest):
            kept.append(word)
    return kept


def _is_vllm_option(option: str, text: str | None, rest: deque[str]) -> bool:
    """Whether only vLLM has an option; its value is then checked, and taken from ``rest`` unless it is ``text``."""
    name = option.removeprefix("--").replace("-", "_")
    options = {**ENGINE, **SERVER}
    positive = name.removeprefix("no_")
    if name not in options and positive in options and options[positive].is_flag:
        options[positive].check(positive, False)
        return True
    if not option.startswith("--") or name not in options:
        return False
    is_set = options[name].is_flag and text is None
    options[name].check(name, True if is_set else _parsed(_value(option, text, rest)))
    return True


def _value(option: str, text: str | None, rest: deque[str]) -> str:
    if text is not None:
        return text
    if not rest:
        raise typer.BadParameter("expected a value after it", param_hint=option)
    return rest.popleft()


def _parsed(text: str) -> Any:
    """Text as the number, list, None or the like that it stands for, or else as it is."""
    if text == "None":
        return None
    try:
        value = json.loads(text.lower() if text in ("True", "False") else text)
    except ValueError:
        return text
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _origins(text: str) -> list[str]:
    """The origins in vLLM's option, which is a list in JSON."""
    value = _parsed(text)
    origins = value if isinstance(value, list) else [text]
    for origin in origins:
        if not isinstance(origin, str):
            raise ValueError(f"allowed_origins: expected texts, got {origin!r:.80}")
    return origins
