"""Finds the form of a model's answers from its chat template, and parses and constrains the answer to one prompt.

::

    ChatFormat    one per model: the form of calls, the tags of reasoning
      AnswerForm    one per prompt: which calls its answer may hold, and whether it begins within reasoning
        AnswerParser  one per answer
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from radixkv.tools.definitions import ToolOptions
from radixkv.tools.derivation.derived_form import derived_form
from radixkv.tools.derivation.probes import TOOLS, NotDerivableError, TemplateProbe
from radixkv.tools.derivation.reading import may_be_form_of
from radixkv.tools.derivation.thoughts import derived_tags
from radixkv.tools.formats.base import CallFormat
from radixkv.tools.formats.deepseek import DeepSeekV3Format, DeepSeekV31Format
from radixkv.tools.formats.glm import GlmFormat
from radixkv.tools.formats.harmony import HarmonyFormat
from radixkv.tools.formats.hermes import HermesFormat
from radixkv.tools.formats.json_object import JsonObjectFormat
from radixkv.tools.formats.llama3_json import Llama3JsonFormat
from radixkv.tools.formats.mistral import MistralFormat, MistralNamedFormat
from radixkv.tools.formats.python_calls import LFM2, OLMO3
from radixkv.tools.formats.qwen3_coder import Qwen3CoderFormat
from radixkv.tools.grammar import AnswerFrame, GrammarWriter
from radixkv.tools.instructions import with_tools_in_words
from radixkv.tools.names import ReasoningParserName, ToolCallParserName
from radixkv.tools.pieces import ReadPiece
from radixkv.tools.reasoning import MISTRAL_THINK, THINK, ReasoningState, ReasoningTags
from radixkv.tools.source import AnswerSource, Parsing, text_until
from radixkv.tools.template_messages import calls_as_text, one_call_per_message, system_messages_in_user_turns

CALL_FORMATS: Mapping[str, CallFormat] = MappingProxyType(
    {
        "hermes": HermesFormat(),
        "qwen3_coder": Qwen3CoderFormat(),
        "glm": GlmFormat(),
        "llama3_json": Llama3JsonFormat(),
        "mistral_v3": MistralFormat(),
        "mistral_v11": MistralNamedFormat(),
        "deepseek_v3": DeepSeekV3Format(),
        "deepseek_v31": DeepSeekV31Format(),
        "harmony": HarmonyFormat(),
        "lfm2": LFM2,
        "olmo3": OLMO3,
        "json": JsonObjectFormat(),
    }
)
_REASONING_TAGS: Mapping[str, ReasoningTags] = MappingProxyType({"think": THINK, "mistral": MISTRAL_THINK})

# Texts by which a chat template shows the form of its calls; the first form whose texts all occur is taken.
_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("mistral_v11", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral_v3", ("[TOOL_CALLS]",)),
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("qwen3_coder", ("<tool_call>", "<function=", "<parameter=")),
    ("glm", ("<tool_call>", "<arg_key>", "<arg_value>")),
    ("hermes", ("<tool_call>",)),
    ("llama3_json", ('"parameters": dictionary of argument name',)),
    ("llama3_json", ("<|python_tag|>",)),
    ("lfm2", ("<|tool_call_start|>", "<|tool_call_end|>")),
    ("olmo3", ("<function_calls>", "<functions>")),
)
# A token by which a vocabulary shows the form, for templates that do not.
_SIGN_TOKENS = MappingProxyType({"<|tool_call_start|>": "lfm2"})


@dataclass(frozen=True)
class ChatFormat:
    """How a model writes its answers.

    Attributes:
        calls: how it writes calls of tools.
        reasoning: between which tags it thinks; None: between none.
        reasoning_markers: texts in these tags that are tokens of their own.
        template_takes_tools: whether the chat template describes tools; otherwise the first message does.
        template_takes_calls: whether it writes earlier calls; otherwise they are part of the text.
        template_takes_system: whether the chat template writes a system message.
        template_takes_later_system: whether it also writes one after a user's message; otherwise that is part of the user's.
        added_tokens: id of each text that is a token of its own.
        special_tokens: those of them that are left out of text by default.
        parsers: the names by which ``calls`` and ``reasoning`` were chosen; "auto": by the template.
    """

    calls: CallFormat
    reasoning: ReasoningTags | None
    reasoning_markers: tuple[str, ...]
    template_takes_tools: bool
    template_takes_calls: bool
    template_takes_system: bool
    template_takes_later_system: bool
    added_tokens: Mapping[str, int]
    special_tokens: frozenset[str]
    parsers: tuple[ToolCallParserName, ReasoningParserName]

    @classmethod
    def of(
        cls, tokenizer: Any, calls: ToolCallParserName = "auto", reasoning: ReasoningParserName = "auto"
    ) -> ChatFormat:
        """The format of a model by its tokenizer, which has a chat template."""
        template: str = tokenizer.get_chat_template(tools=[dict(TOOLS[0])])
        probe = TemplateProbe(tokenizer)
        form = _form_of(template, probe) if calls == "auto" else CALL_FORMATS[calls]
        tags = _tags_of(template, probe, form) if reasoning == "auto" else _REASONING_TAGS.get(reasoning)
        tags_text = "" if tags is None else f"{tags.open}{tags.close}"
        tokens = tokenizer.added_tokens_decoder
        return cls(
            calls=form,
            reasoning=tags,
            reasoning_markers=tuple(token for token in probe.added_tokens if token in tags_text),
            # A template whose form is not known would ask for calls in some other form than "json".
            template_takes_tools=form is not CALL_FORMATS["json"] and probe.takes_tools(),
            # Where all parts of an answer are marked, calls cannot be part of its text.
            template_takes_calls=form.frames_every_answer or probe.writes_calls(),
            template_takes_system=probe.takes_system(["system", "user"]),
            template_takes_later_system=probe.takes_system(["user", "system", "assistant", "user"]),
            added_tokens={token.content: token_id for token_id, token in tokens.items()},
            special_tokens=frozenset(token.content for token in tokens.values() if token.special),
            parsers=(calls, reasoning),
        )

    def as_template_messages(
        self, messages: Sequence[Mapping[str, Any]], options: ToolOptions | None
    ) -> Sequence[Mapping[str, Any]]:
        """The messages as the template takes them: with tools described in words, if it does not support them."""
        if not self.template_takes_later_system:
            messages = system_messages_in_user_turns(messages)
        if self.template_takes_tools:
            if not self.template_takes_calls:
                return calls_as_text(messages, self.calls)
            if not self.calls.parallel:
                messages = one_call_per_message(messages)
            return [self.calls.as_template_message(message) for message in messages]
        definitions = () if options is None else options.definitions
        return with_tools_in_words(messages, definitions, self.calls, takes_system=self.template_takes_system)

    def template_tools(self, options: ToolOptions | None) -> list[Mapping[str, Any]] | None:
        """The tools that the template is given."""
        return list(options.definitions) if options is not None and self.template_takes_tools else None

    def answer_form(
        self, prompt: str, options: ToolOptions | None, *, continued: str | None = None
    ) -> AnswerForm | None:
        """What the answer to a prompt looks like.

        Args:
            prompt: its text, up to where the answer begins.
            continued: text of the message that the answer continues; None: it begins a message.

        Returns:
            None: the answer is text only.
        """
        if options is None and self.reasoning is None and not self.calls.frames_every_answer:
            return None
        state: ReasoningState = "over"
        if self.reasoning is not None:
            state = self.reasoning.state_after(prompt) if continued is None else self.reasoning.state_within(continued)
        return AnswerForm(self, state, options, continues=continued is not None)


@dataclass(frozen=True)
class AnswerForm:
    """What the answer to one prompt looks like.

    Attributes:
        reasoning: whether the answer begins before, within or after its reasoning.
        options: which calls it may hold; None: there are no tools.
        continues: whether it goes on with a message that has begun.
    """

    format: ChatFormat
    reasoning: ReasoningState
    options: ToolOptions | None
    continues: bool

    @property
    def calls_required(self) -> bool:
        """Whether the answer, after its reasoning, is calls and no text."""
        return self.options is not None and self.options.mode == "required"

    @property
    def may_reason(self) -> bool:
        """Whether the answer may hold reasoning."""
        return self.reasoning != "over" or self.format.calls.frames_every_answer

    @property
    def special_markers(self) -> list[int]:
        """The special tokens by which parts of the answer are recognised in its text."""
        markers = self.format.reasoning_markers
        if self._may_call or self.format.calls.frames_every_answer:
            markers = (*markers, *self.format.calls.markers)
        return [self.format.added_tokens[marker] for marker in markers if marker in self.format.special_tokens]

    def frame(self, *, content_is_constrained: bool) -> AnswerFrame | None:
        """The grammar for the whole answer; None: there is none, or the one for its content covers it all.

        Args:
            content_is_constrained: whether the request constrains the answer's text (``@content``).

        Raises:
            ValueError: the schema of a strict tool cannot be enforced in this format.
        """
        if self.options is None and not content_is_constrained:
            return None
        calls, reasoning = self.format.calls, self.format.reasoning
        writer = GrammarWriter(self.format.added_tokens, self._shown_tokens())
        thought = "" if reasoning is None else reasoning.grammar(writer, self.reasoning)
        if self.options is None and not thought and not calls.frames_every_answer:
            return None
        content = "@content" if content_is_constrained else None
        return writer.frame(f"{thought} ({calls.grammar(writer, self.options, content, continues=self.continues)})")

    def parser(self) -> AnswerParser:
        """A parser for one answer."""
        tools = self.options.tools if self.options is not None and self._may_call else {}
        source = AnswerSource(
            tools, self.format.calls.new_id, calls_required=self.calls_required, continues=self.continues
        )
        return AnswerParser(source, self._parse(source))

    @property
    def _may_call(self) -> bool:
        return self.options is not None and self.options.mode != "none"

    def _shown_tokens(self) -> Iterable[str]:
        hidden = {*self.format.special_tokens, *self.format.calls.markers, *self.format.reasoning_markers}
        return [token for token in self.format.added_tokens if token not in hidden]

    def _parse(self, source: AnswerSource) -> Parsing[None]:
        if self.format.reasoning is not None:
            yield from self.format.reasoning.parse(source, self.reasoning)
        if self._may_call or self.format.calls.frames_every_answer:
            yield from self.format.calls.parse(source)
        else:
            yield from text_until(source, [])


class AnswerParser:
    """Takes the text of one answer piece by piece."""

    def __init__(self, source: AnswerSource, steps: Parsing[None]) -> None:
        self._source = source
        self._steps = steps

    def feed(self, text: str) -> list[ReadPiece]:
        """The pieces that more text completes."""
        self._source.feed(text)
        return self._read() if text else []

    def finish(self) -> list[ReadPiece]:
        """The last pieces, after which there is no more text."""
        self._source.ended = True
        return self._read()

    def _read(self) -> list[ReadPiece]:
        read = []
        for piece in self._steps:
            if piece is None:
                break
            read.append(ReadPiece(piece, self._source.num_taken))
        return read


def _form_of(template: str, probe: TemplateProbe) -> CallFormat:
    """The known form of whose signs a template has all, unless it writes calls in another, which is then derived."""
    by_template = (form for form, signs in _SIGNS if all(sign in template for sign in signs))
    by_token = (form for token, form in _SIGN_TOKENS.items() if token in probe.added_tokens)
    name = next(itertools.chain(by_template, by_token), None)
    if name is not None and may_be_form_of(CALL_FORMATS[name], probe):
        return CALL_FORMATS[name]
    try:
        return derived_form(probe)
    except NotDerivableError:
        return CALL_FORMATS["json"]


def _tags_of(template: str, probe: TemplateProbe, form: CallFormat) -> ReasoningTags | None:
    """The known tags whose end is in a template, else those between which it writes thoughts."""
    known = next((tags for tags in _REASONING_TAGS.values() if tags.close in template), None)
    return known if known is not None or form.frames_every_answer else derived_tags(probe)
