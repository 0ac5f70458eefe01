"""Structured output in requests: OpenAI's ``response_format``, vLLM's ``structured_outputs``, vLLM's older ``guided_*``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from radixkv.sampling_params import StructuredOutputsParams
from radixkv.server.strict import StrictModel
from radixkv.tools.grammar import closed_schema

_MAX_STRUCTURES = 128
# Kinds of vLLM's older fields, each named "guided_" and the kind.
_GUIDED_KINDS = ("json", "regex", "choice", "grammar")


class TextFormat(StrictModel):
    """Unconstrained text."""

    type: Literal["text"]


class JsonObjectFormat(StrictModel):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(StrictModel):
    """A schema, and the fields that OpenAI's clients send with it; it is always enforced.

    With ``strict``, objects have no properties that it does not name, unless it says so: OpenAI demands that such schemas say
    they have none.
    """

    name: str
    description: str | None = None
    json_schema: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None

    @property
    def enforced(self) -> dict[str, Any] | bool:
        """The schema that answers satisfy."""
        return (
            closed_schema(self.json_schema) if self.strict and isinstance(self.json_schema, dict) else self.json_schema
        )


class JsonSchemaFormat(StrictModel):
    """JSON that satisfies a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class TagStructure(StrictModel):
    """A part of the answer between two texts, which satisfies a schema."""

    begin: str
    json_schema: dict[str, Any] | bool = Field(alias="schema")
    end: str


class StructuralTagFormat(StrictModel):
    """Free text, in which what follows a trigger is one of the structures. (vLLM's form.)"""

    type: Literal["structural_tag"]
    structures: Annotated[list[TagStructure], Field(min_length=1, max_length=_MAX_STRUCTURES)]
    triggers: Annotated[list[str], Field(min_length=1, max_length=_MAX_STRUCTURES)]


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat


class StructuredOutputs(StrictModel):
    """Exactly one of these; see `radixkv.StructuredOutputsParams`."""

    json_schema: str | dict[str, Any] | bool | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None


class StructuredRequest(StrictModel):
    """The fields of a request that constrain its answer; at most one of them may be set."""

    response_format: ResponseFormat | None = Field(default=None, discriminator="type")
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @property
    def structured_outputs_name(self) -> str | None:
        """The name of the field that constrains the answer; the first, where several do; None: none does."""
        fields = [f"guided_{kind}" for kind in _GUIDED_KINDS]
        if not isinstance(self.response_format, TextFormat):
            fields.append("response_format")
        fields.append("structured_outputs")
        return next((field for field in fields if getattr(self, field) is not None), None)

    def structured_outputs_params(self) -> StructuredOutputsParams | None:
        """The constraint on the answer; None: none.

        Raises:
            TypeError, ValueError: several fields are set, or one is invalid.
        """
        specs: list[dict[str, Any]] = [
            {kind: value} for kind in _GUIDED_KINDS if (value := getattr(self, f"guided_{kind}")) is not None
        ]
        if self.structured_outputs is not None:
            specs.append(self.structured_outputs.model_dump(by_alias=True))
        if isinstance(self.response_format, JsonObjectFormat):
            specs.append({"json_object": True})
        elif isinstance(self.response_format, JsonSchemaFormat):
            specs.append({"json": self.response_format.json_schema.enforced})
        elif isinstance(self.response_format, StructuralTagFormat):
            specs.append({"structural_tag": self.response_format.model_dump(by_alias=True, exclude={"type"})})
        if len(specs) > 1:
            raise ValueError(
                f"structured_outputs: expected at most one field that constrains the answer, got {len(specs)}"
            )
        return StructuredOutputsParams(**specs[0]) if specs else None
