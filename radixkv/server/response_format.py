"""Structured output in requests: OpenAI's ``response_format``, vLLM's ``structured_outputs``, vLLM's older ``guided_*``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from radixkv.sampling_params import StructuredOutputsParams
from radixkv.server.strict import StrictModel
from radixkv.tools.closed_schema import closed_schema

_MAX_STRUCTURES = 128
# vLLM's older fields, each named after an argument of `StructuredOutputsParams`.
_GUIDED_FIELDS = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


class TextFormat(StrictModel):
    """Unconstrained text."""

    type: Literal["text"]


class JsonObjectFormat(StrictModel):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(StrictModel):
    """A schema, which is always enforced, and the fields that OpenAI's clients send with it.

    With ``strict``, objects have only the properties that the schema names, unless it explicitly allows others.
    """

    name: str
    description: str | None = None
    json_schema: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None

    @property
    def enforced(self) -> dict[str, Any] | bool:
        """The schema that answers satisfy."""
        schema = self.json_schema
        return closed_schema(schema) if self.strict and isinstance(schema, dict) else schema


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
    def _constraints(self) -> list[str]:
        """The names of the fields that constrain the answer."""
        fields = [*_GUIDED_FIELDS, "response_format", "structured_outputs"]
        return [field for field in fields if not isinstance(getattr(self, field), TextFormat | None)]

    @property
    def structured_outputs_name(self) -> str | None:
        """The name of the field that constrains the answer; the first, where several do; None: none does."""
        return next(iter(self._constraints), None)

    def structured_outputs_params(self) -> StructuredOutputsParams | None:
        """The constraint on the answer; None: none.

        Raises:
            TypeError, ValueError: several fields are set, or one is invalid.
        """
        names = self._constraints
        if not names:
            return None
        if len(names) > 1:
            raise ValueError(
                f"structured_outputs: expected at most one field that constrains the answer, got {len(names)}"
            )
        match getattr(self, names[0]):
            case StructuredOutputs() as given:
                return StructuredOutputsParams(**given.model_dump(by_alias=True))
            case JsonObjectFormat():
                return StructuredOutputsParams(json_object=True)
            case JsonSchemaFormat(json_schema=schema):
                return StructuredOutputsParams(json=schema.enforced)
            case StructuralTagFormat() as tag:
                return StructuredOutputsParams(structural_tag=tag.model_dump(by_alias=True, exclude={"type"}))
            case guided:
                return StructuredOutputsParams(**{names[0].removeprefix("guided_"): guided})
