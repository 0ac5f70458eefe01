"""What clients ask an answer to look like, in OpenAI's way, in vLLM's, and in vLLM's older one."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from radixkv.sampling_params import StructuredOutputsParams
from radixkv.server.strict import Strict

# What vLLM's older fields can ask for, each as "guided_" and the name.
_GUIDES = ("json", "regex", "choice", "grammar")


class TextFormat(Strict):
    """Anything."""

    type: Literal["text"]


class JsonObjectFormat(Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(Strict):
    """A schema, and what OpenAI's clients send with it; it is always followed strictly."""

    name: str
    description: str | None = None
    json_schema: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Strict):
    """JSON that satisfies a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class StructuredOutputs(Strict):
    """Exactly one of these; see `radixkv.StructuredOutputsParams`."""

    json_schema: str | dict[str, Any] | bool | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class StructuredRequest(Strict):
    """The fields of a request that say what its answer must look like; at most one of them may."""

    response_format: ResponseFormat | None = Field(default=None, discriminator="type")
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @property
    def structured_outputs_name(self) -> str:
        """Which field says what the answer must look like; the first of them, where there should be only one."""
        fields = [f"guided_{name}" for name in _GUIDES]
        if not isinstance(self.response_format, TextFormat):
            fields.append("response_format")
        return next((field for field in fields if getattr(self, field) is not None), "structured_outputs")

    def structured_outputs_params(self) -> StructuredOutputsParams | None:
        """What the answer must look like; None: anything.

        Raises:
            TypeError, ValueError: several say something, or one says what is impossible.
        """
        specs: list[dict[str, Any]] = [
            {name: value} for name in _GUIDES if (value := getattr(self, f"guided_{name}")) is not None
        ]
        if self.structured_outputs is not None:
            specs.append(self.structured_outputs.model_dump(by_alias=True))
        if isinstance(self.response_format, JsonObjectFormat):
            specs.append({"json_object": True})
        elif isinstance(self.response_format, JsonSchemaFormat):
            specs.append({"json": self.response_format.json_schema.json_schema})
        if len(specs) > 1:
            raise ValueError("structured_outputs: the request says more than once what the answer must look like")
        return StructuredOutputsParams(**specs[0]) if specs else None
