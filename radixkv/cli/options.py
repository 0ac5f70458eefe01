"""Options that several commands share, and options generated from the fields of a configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer

from radixkv.cli.output_paths import given_path, writable
from radixkv.config import DEVICE_DEFAULTS, Config, ModelConfig
from radixkv.option_words import Accepted
from radixkv.server.config import ServerConfig

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

ENVIRONMENT_PREFIX = "RADIXKV_"

Model = Annotated[str | None, typer.Option(help=ServerConfig.model_fields["model"].description)]
JsonPath = Annotated[
    Path | None,
    typer.Option(
        "--json", parser=given_path, metavar="<path>", callback=writable, help="also write the figures to this file"
    ),
]

_ARGUMENTS = frozenset({"model"})
# Repeated: one key each.
_FLAGS: Mapping[str, str] = MappingProxyType({"api_keys": "--api-key", "cors_origins": "--cors-origin"})
# Fields whose configuration's own error says more about a wrong value than a list of choices would.
_CHECKED: Mapping[str, type[Config]] = MappingProxyType(
    dict.fromkeys(("quantization", "tool_call_parser", "reasoning_parser"), ModelConfig)
)
_NO_TEXT = frozenset({"tokenizer", "tiers"})  # objects, which no command line can name

_Command = TypeVar("_Command", bound=Callable[..., None])


def command_line_fields(configs: Collection[type[Config]], only: Collection[str] | None = None) -> dict[str, FieldInfo]:
    """Fields of configurations that can be set by text, by name."""
    fields = {name: field for config in configs for name, field in config.model_fields.items() if name not in _NO_TEXT}
    return fields if only is None else {name: fields[name] for name in only}


def variable_of(name: str) -> str:
    """The environment variable that sets a field."""
    return f"{ENVIRONMENT_PREFIX}{name.upper()}"


def is_given(context: typer.Context, name: str) -> bool:
    """Whether an option of the running command was set, and does not just have its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def with_options_of(*configs: type[Config], only: Collection[str] | None = None) -> Callable[[_Command], _Command]:
    """Give a command an option for every field of configurations; it receives them as its ``**keywords``.

    Help, range, choices and default are the field's, and each can also be set by its environment variable.

    Args:
        only: names of the fields that are wanted; None: all.
    """

    def decorate(command: _Command) -> _Command:
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        fields = command_line_fields(configs, only)
        panels = {
            name: f"{config.__name__.removesuffix('Config')} options"
            for config in configs
            for name in config.model_fields
        }
        made = [_parameter(name, field, panels[name]) for name, field in fields.items()]
        command.__signature__ = signature.replace(parameters=[*own, *made])  # type: ignore[attr-defined]
        return command

    return decorate


def _parameter(name: str, field: FieldInfo, panel: str) -> inspect.Parameter:
    accepted = Accepted.of(field)
    kind = _option_type(accepted)
    settings: dict[str, Any] = {"help": field.description, "envvar": variable_of(name)}
    if name in _ARGUMENTS:
        info = typer.Argument(**settings)
    else:
        if kind in (int, float):
            settings |= {"min": None if accepted.above_low else accepted.low, "max": accepted.high}
        if name in DEVICE_DEFAULTS["cpu"]:
            settings["show_default"] = (
                f"{DEVICE_DEFAULTS['cuda'][name]} on a GPU, {DEVICE_DEFAULTS['cpu'][name]} on a CPU"
            )
        if kind == list[str]:
            settings["help"] += " May be repeated; the variable separates several by spaces."
        if kind is Path:
            settings |= {"parser": given_path, "metavar": "<path>"}
        if name == "record_trace":
            settings["callback"] = writable
        if name in _CHECKED:
            settings |= {"callback": _as_configured, "metavar": f"<{'|'.join(get_args(kind))}>"}
            kind = str
        flags = [_FLAGS[name]] if name in _FLAGS else []
        info = typer.Option(*flags, rich_help_panel=panel, **settings)
    default = field.default
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=list(default) if isinstance(default, tuple) else default,
        annotation=Annotated[kind | None if accepted.optional else kind, info],
    )


def _as_configured(parameter: typer.CallbackParam, value: str | None) -> str | None:
    name = str(parameter.name)
    try:
        _CHECKED[name](**{name: value})
    except ValueError as error:
        raise typer.BadParameter(str(error).removeprefix(f"{name}: ")) from None
    return value


def _option_type(accepted: Accepted) -> Any:
    """The type that Typer is to parse for a field."""
    kind = accepted.kinds[0]
    if Path in accepted.kinds:
        return Path
    if kind is Any or str in accepted.kinds:
        return str
    if kind in (bool, int, float, str) or get_origin(kind) is Literal:
        return kind
    return list[str]
