"""Options and fields of requests in the documentation are those of the code."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from openai.types import chat, completion_create_params, responses
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from sybil import Sybil
from sybil.parsers.markdown import CodeBlockParser

from radixkv.cli.config_file import read_config_file
from radixkv.config import DEVICE_DEFAULTS, Config, EngineConfig, ModelConfig
from radixkv.option_words import Accepted
from radixkv.ray.options import PlacementConfig
from radixkv.server.access.keys import read_keys_file
from radixkv.server.chat.request import ChatCompletionRequest
from radixkv.server.completions import CompletionRequest
from radixkv.server.config import ServerConfig
from radixkv.server.not_supported import is_supported
from radixkv.server.responses.request import ResponseRequest

PAGE = Path(__file__).parent.parent.parent / "docs" / "serve.md"
_TITLES = {ServerConfig: "server", ModelConfig: "model", EngineConfig: "engine", PlacementConfig: "placement"}


def options_table(config: type[Config]) -> str:
    """The fields that text can set: name, default, meaning."""
    rows = [
        f"| `{name}` | {_default(name, field.default)} | {_meaning(field)} |"
        for name, field in config.model_fields.items()
        if name not in ("tokenizer", "tiers")  # objects
    ]
    return "\n".join([f"| {_TITLES[config]} | default | |", "|---|---|---|", *rows])


def _meaning(field: FieldInfo) -> str:
    choices = [choice for kind in Accepted.of(field).kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    listed = f" One of {', '.join(map(_shown, choices))}." if choices else ""
    return " ".join(str(field.description).split()) + listed


def _default(name: str, default: Any) -> str:
    by_device = {device: values[name] for device, values in DEVICE_DEFAULTS.items() if name in values}
    if by_device:
        return f"{_shown(by_device['cuda'])} on a GPU, {_shown(by_device['cpu'])} on a CPU"
    return "" if default is None or default == () else _shown(default)


def _shown(value: Any) -> str:
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def test_the_tables_are_those_of_the_configurations() -> None:
    page = PAGE.read_text()
    for config in _TITLES:
        assert options_table(config) in page, f"docs/serve.md should have\n\n{options_table(config)}"


@pytest.mark.parametrize("page", [PAGE, PAGE.with_name("operate.md")], ids=lambda page: page.name)
def test_the_example_of_a_file_is_one(page: Path, tmp_path: Path) -> None:
    examples = list(Sybil(parsers=[CodeBlockParser("toml", lambda _: None)]).parse(page).examples())
    assert examples
    for example in examples:
        path = tmp_path / "radixkv.toml"
        path.write_text(example.parsed)
        if example.parsed.startswith("# keys.toml"):
            assert read_keys_file(path)
            continue
        assert read_config_file(path, list(_TITLES)) == tomllib.loads(example.parsed)


@pytest.mark.parametrize(
    ("body", "openais", "page"),
    [
        (ChatCompletionRequest, chat.completion_create_params.CompletionCreateParamsStreaming, PAGE),
        (CompletionRequest, completion_create_params.CompletionCreateParamsStreaming, PAGE),
        (ResponseRequest, responses.response_create_params.ResponseCreateParamsStreaming, PAGE.with_name("clients.md")),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_every_field_of_a_request_that_is_not_openais_is_documented(
    body: type[BaseModel], openais: type, page: Path
) -> None:
    fields = {name for name, field in body.model_fields.items() if is_supported(field)}
    assert fields - openais.__annotations__.keys() - set(re.findall(r"`(\w+)", page.read_text())) == set()
