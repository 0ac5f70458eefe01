"""The kinds of work on which drafts are measured: said before, rewritten, held by a grammar, and new.

Texts are Python's own: sources and docstrings of its standard library.
"""

from __future__ import annotations

import heapq
import inspect
import json
import shlex
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from radixkv.outputs import RequestOutput
from radixkv.sampling_params import SamplingParams, StructuredOutputsParams

_TOPICS = (
    "the sea", "volcanoes", "bread", "railways", "bees", "glass", "the moon", "chess",
    "rivers", "paper", "clocks", "salt", "bridges", "wool", "maps", "thunder",
)  # fmt: skip
_NAMES = ("Ann", "Ben", "Carla", "David", "Edith", "Frank", "Greta", "Henry")
_CODE: tuple[Callable[..., Any], ...] = (
    heapq.nlargest, heapq.nsmallest, heapq.merge, shlex.join, shlex.quote, shlex.split,
    statistics.harmonic_mean, statistics.mode, statistics.multimode, statistics.median_low, statistics.median_high,
    textwrap.wrap, textwrap.dedent, textwrap.indent, textwrap.shorten,
    inspect.getdoc, inspect.cleandoc, inspect.getmodulename, inspect.unwrap, inspect.getfile,
)  # fmt: skip
_SCHEMA = {
    "type": "object",
    "properties": {
        **{
            name: {"type": "string", "maxLength": 12}
            for name in ("first_name", "last_name", "street_address", "city_name")
        },
        **{name: {"type": "integer", "maximum": 99} for name in ("age_in_years", "number_of_children", "shoe_size")},
        **{name: {"type": "boolean"} for name in ("is_employed", "has_driving_licence", "owns_a_house")},
        "favourite_colour": {"enum": ["red", "green", "blue"]},
        "preferred_language": {"enum": ["English", "French", "German"]},
    },
    "additionalProperties": False,
}
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather_forecast",
        "description": "The weather of the next days.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 16},
                "temperature_unit": {"enum": ["celsius", "fahrenheit"]},
                "number_of_days": {"type": "integer", "maximum": 9},
            },
            "required": ["city", "temperature_unit", "number_of_days"],
            "additionalProperties": False,
        },
    },
}

Message = dict[str, Any]


class Session(Protocol):
    """What runs conversations, side by side, and counts."""

    def chat(
        self, conversations: Sequence[Sequence[Message]], params: SamplingParams, **options: Any
    ) -> list[RequestOutput]:
        """Answer them."""


@dataclass(frozen=True, slots=True)
class Work:
    """One row of the benchmark.

    Attributes:
        name: of the row.
        wanted: at least this many times the tokens a second of the same without drafts.
        measured: runs the work.
        before: run first, and not measured; None: the cache is empty.
        prompt_lookup: whether transformers' prompt look-up can do the same: greedy, one conversation at a time.
    """

    name: str
    wanted: float
    measured: Callable[[Session], None]
    before: Callable[[Session], None] | None = None
    prompt_lookup: bool = False


def make_work(num_tokens: int) -> list[Work]:
    """All rows.

    Args:
        num_tokens: of an answer at most.
    """
    greedy = SamplingParams(temperature=0.0, max_tokens=num_tokens)
    penalized = replace(greedy, repetition_penalty=1.1)
    warm = SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=num_tokens)
    cool = replace(warm, temperature=0.3)
    creative = SamplingParams(temperature=1.0, seed=3, max_tokens=num_tokens)
    questions = [_user(f"Write three short sentences about {topic}.") for topic in _TOPICS]
    stories = [_user(f"Invent a strange story about {topic}.") for topic in _TOPICS]
    code = [inspect.getsource(function)[:700] for function in _CODE]
    rewrites = [
        _user(f"Rewrite this code with one name changed, {_parameter(function)} to value:\n```python\n{text}\n```")
        for function, text in zip(_CODE, code, strict=True)
    ]
    document = inspect.getsource(textwrap)[:6000]
    quotes = [
        _user(f"{document}\n\nQuote, word for word, the docstring of {name}.")
        for name in ("TextWrapper", "wrap", "fill", "shorten", "dedent", "indent")
    ]
    schema = replace(warm, structured_outputs=StructuredOutputsParams(json=_SCHEMA), max_tokens=max(num_tokens, 160))
    people = [_user(f"Describe {name} as JSON.") for name in _NAMES]
    many = [_user(f"Invent a strange story about {topic} and {other}.") for topic in _TOPICS for other in _TOPICS[:4]]
    return [
        Work("asked again, greedy", 4.0, one_by_one(questions, greedy), one_by_one(questions, greedy)),
        Work("asked again, temperature 0.8", 4.0, one_by_one(questions, warm), one_by_one(questions, warm)),
        Work("asked again, greedy, penalty 1.1", 4.0, one_by_one(questions, penalized), one_by_one(questions, penalized)),
        Work("asked again, 16 side by side", 4.0, together(questions, warm), together(questions, warm)),
        Work("regenerated, temperature 0.3", 1.5, one_by_one(questions, replace(cool, seed=2)), one_by_one(questions, cool)),
        Work("code with a name changed", 2.5, one_by_one(rewrites, greedy), prompt_lookup=True),
        Work("code with a name changed, penalty 1.1", 2.5, one_by_one(rewrites, penalized)),
        Work("JSON with 12 keys", 2.5, one_by_one(people, schema)),
        Work("tool calls, 20 turns", 2.5, _tool_calls(replace(greedy, max_tokens=64))),
        Work("quotes from 1,500 tokens", 2.0, one_by_one(quotes, greedy), prompt_lookup=True),
        Work("16 creative ones, temperature 1", 0.98, together(stories, creative)),
        Work("64 side by side, temperature 1", 0.98, together(many, replace(creative, max_tokens=num_tokens // 2))),
    ]  # fmt: skip


def one_by_one(conversations: Sequence[Sequence[Message]], params: SamplingParams) -> Callable[[Session], None]:
    """One conversation after the other."""

    def run(session: Session) -> None:
        for conversation in conversations:
            session.chat([conversation], params)

    return run


def together(conversations: Sequence[Sequence[Message]], params: SamplingParams) -> Callable[[Session], None]:
    """All side by side."""

    def run(session: Session) -> None:
        session.chat(conversations, params)

    return run


def _tool_calls(params: SamplingParams) -> Callable[[Session], None]:
    """An agent that calls a tool in every turn of one conversation."""

    def run(session: Session) -> None:
        messages: list[Message] = []
        for turn in range(20):
            messages.append({"role": "user", "content": f"What is the weather in city number {turn}?"})
            (output,) = session.chat([messages], params, tools=[_TOOL], tool_choice="required")
            text = output.outputs[0].text
            result: Mapping[str, Any] = {"city": turn, "forecast": "sunny"}
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": json.dumps(result)}]

    return run


def _user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def _parameter(function: Callable[..., Any]) -> str:
    return next(iter(inspect.signature(function).parameters))
