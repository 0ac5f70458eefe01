"""The kinds of work on which drafts are measured: text said before, rewritten, constrained by a grammar, and new.

Texts are sources and docstrings of Python's standard library. Questions are chosen so that answers end by themselves.
"""

from __future__ import annotations

import heapq
import inspect
import json
import re
import shlex
import statistics
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol

from radixkv.outputs import RequestOutput
from radixkv.sampling_params import SamplingParams, StructuredOutputsParams

_TOPICS = (
    "the sea", "volcanoes", "bread", "railways", "bees", "glass", "the moon", "chess",
    "rivers", "paper", "clocks", "salt", "bridges", "wool", "maps", "thunder",
)  # fmt: skip
_NAMES = ("Ann", "Ben", "Carla", "David", "Edith", "Frank")
_CODE: tuple[Callable[..., Any], ...] = (
    heapq.nlargest, heapq.nsmallest, textwrap.fill, shlex.join, shlex.quote, shlex.split,
    statistics.harmonic_mean, statistics.mode, statistics.multimode, statistics.median_low, statistics.median_high,
    textwrap.wrap, textwrap.dedent, textwrap.indent, textwrap.shorten,
    inspect.getdoc, inspect.cleandoc, inspect.getmodulename, inspect.unwrap, inspect.getfile,
)  # fmt: skip
_CODE_CHARACTERS = 600
_DOCUMENT_CHARACTERS = 6000
_PROPERTIES = MappingProxyType(
    {
        **{
            name: {"type": "string", "maxLength": 12}
            for name in ("first_name", "last_name", "street_address", "city_name")
        },
        **{name: {"type": "integer", "maximum": 99} for name in ("age_in_years", "number_of_children", "shoe_size")},
        **{name: {"type": "boolean"} for name in ("is_employed", "has_driving_licence", "owns_a_house")},
        "favourite_colour": {"enum": ["red", "green", "blue"]},
        "preferred_language": {"enum": ["English", "French", "German"]},
    }
)
_SCHEMA = MappingProxyType(
    {
        "type": "object",
        "properties": dict(_PROPERTIES),
        "additionalProperties": False,
        "required": list(_PROPERTIES),
    }
)
_JSON_TOKENS = 192
_TOOL = MappingProxyType(
    {
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
)
_TURNS = 20
# Work that is measured in one piece gets this many times as many rounds.
_ROUNDS_TOGETHER = 10

Message = dict[str, Any]


class Session(Protocol):
    """Answers conversations side by side, and measures that.

    Attributes:
        messages: of a conversation that continues from part to part.
    """

    messages: list[Message]

    def chat(
        self, conversations: Sequence[Sequence[Message]], params: SamplingParams, **options: Any
    ) -> list[RequestOutput]:
        """Answer them."""


Part = Callable[[Session], None]


@dataclass(frozen=True, slots=True)
class Work:
    """One row of the benchmark.

    Attributes:
        name: of the row.
        wanted: the least acceptable speed-up over the same work without drafts; None: no gain is expected.
        parts: the work; each part is run both without drafts and with them before the next one.
        before: run first, and not measured; without any, the cache is empty.
        rounds: the factor by which its rounds are more than those of other work.
        peers: whether other engines' drafts can do the same: greedy, one conversation at a time, nothing said before.
    """

    name: str
    wanted: float | None
    parts: Sequence[Part]
    before: Sequence[Part] = ()
    rounds: int = 1
    peers: bool = False


def make_work(num_tokens: int) -> list[Work]:
    """All rows.

    Args:
        num_tokens: maximum length of an answer, where no schema needs more.
    """
    greedy = SamplingParams(temperature=0.0, max_tokens=num_tokens)
    penalized = replace(greedy, repetition_penalty=1.1)
    warm = SamplingParams(temperature=0.8, top_p=0.95, seed=1, max_tokens=num_tokens)
    cool = replace(warm, temperature=0.3)
    creative = SamplingParams(temperature=1.0, seed=3, max_tokens=num_tokens)
    questions = [_user(f"Say something about {topic} in one or two sentences.") for topic in _TOPICS]
    stories = [_user(f"Invent a strange story about {topic}.") for topic in _TOPICS]
    many = [_user(f"Invent a strange story about {topic} and {other}.") for topic in _TOPICS for other in _TOPICS[:4]]
    renamed = [_user(_rename(code)) for code in map(_source, _CODE)]
    fixed = [_user(f"Fix this code:\n{_fenced(_broken(code))}") for code in map(_source, _CODE)]
    document = inspect.getsource(textwrap)[:_DOCUMENT_CHARACTERS]
    quotes = [
        _user(f"{document}\n\nQuote, word for word, the docstring of {name}.")
        for name in ("TextWrapper", "wrap", "fill", "shorten", "dedent", "indent")
    ]
    schema = replace(warm, structured_outputs=StructuredOutputsParams(json=dict(_SCHEMA)), max_tokens=_JSON_TOKENS)
    people = [_user(f"Describe {name} as JSON.") for name in _NAMES]
    tools = [_turn(turn, greedy) for turn in range(_TURNS)]

    def again(name: str, params: SamplingParams) -> Work:
        return Work(f"asked again, {name}", 4.0, _each(questions, params), _each(questions, params))

    return [
        again("greedy", greedy),
        again("temperature 0.8", warm),
        again("greedy, penalty 1.1", penalized),
        Work("another seed, temperature 0.3", 1.5, _each(questions, replace(cool, seed=2)), _each(questions, cool)),
        Work("a name changed in code", 2.5, _each(renamed, greedy), peers=True),
        Work("a name changed in code, penalty 1.1", None, _each(renamed[::2], penalized)),
        Work("code fixed", 2.5, _each(fixed, greedy), peers=True),
        Work("JSON with 12 keys", 2.5, _each(people, schema)),
        Work("tool calls, 20 turns", 2.5, tools),
        Work("quotes from 1,500 tokens", 2.0, _each(quotes, greedy), peers=True),
        Work("16 side by side, temperature 1", 0.98, [_together(stories, creative)], rounds=_ROUNDS_TOGETHER),
        Work("64 side by side, temperature 1", 0.98, [_together(many, creative)], rounds=_ROUNDS_TOGETHER),
    ]


def _each(conversations: Sequence[Sequence[Message]], params: SamplingParams) -> list[Part]:
    """One conversation after the other."""
    return [_together([conversation], params) for conversation in conversations]


def _together(conversations: Sequence[Sequence[Message]], params: SamplingParams) -> Part:
    """All side by side."""

    def run(session: Session) -> None:
        session.chat(conversations, params)

    return run


def _turn(turn: int, params: SamplingParams) -> Part:
    """A turn of an agent that calls a tool in each."""

    def run(session: Session) -> None:
        messages = session.messages
        messages.append({"role": "user", "content": f"What is the weather in city number {turn}?"})
        (output,) = session.chat([messages], params, tools=[dict(_TOOL)], tool_choice="required")
        result = json.dumps({"city": turn, "forecast": "sunny"})
        messages.append({"role": "assistant", "content": output.outputs[0].text})
        messages.append({"role": "user", "content": result})

    return run


def _user(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def _source(function: Callable[..., Any]) -> str:
    """The first whole lines of its source."""
    return textwrap.dedent(inspect.getsource(function))[:_CODE_CHARACTERS].rpartition("\n")[0]


def _fenced(code: str) -> str:
    return f"```python\n{code}\n```"


def _rename(code: str) -> str:
    """A question that asks to rename a function's first parameter."""
    name = re.search(r"\((\w+)", code)
    assert name is not None
    return f"Rewrite this code with one name changed, {name[1]} to value:\n{_fenced(code)}"


def _broken(code: str) -> str:
    """The code without the colon at the end of the function's head."""
    return re.sub(r"\):\n", ")\n", code, count=1)
