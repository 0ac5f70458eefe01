"""Chat templates in place of a tokenizer's own."""

from __future__ import annotations

import copy
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError, TemplateSyntaxError

from radixkv.text_files import read_utf8
from radixkv.tools.chat_format import ChatFormat
from radixkv.tools.names import ReasoningParserName, ToolCallParserName

_MAX_TEMPLATES = 8


class ChatTemplate(NamedTuple):
    """A template.

    Attributes:
        text: Jinja.
        file: that it was read from; None: it was given as text.
    """

    text: str
    file: str | None

    @classmethod
    def read(cls, template: str | Path) -> ChatTemplate:
        """The template that is given.

        Args:
            template: Jinja, or a file of it.

        Raises:
            ValueError: it is neither.
        """
        if isinstance(template, str) and "{" in template:
            return cls(template, None)
        try:
            return cls(read_utf8(Path(template)), str(template))
        except OSError as error:
            raise ValueError(
                f"chat_template: expected a file or a Jinja template, got {str(template)!r:.80} ({error.strerror})"
            ) from error
        except ValueError as error:
            raise ValueError(f"chat_template: {error}") from error


def with_template(tokenizer: Any, template: ChatTemplate) -> Any:
    """A tokenizer with a template, and the same vocabulary.

    Raises:
        ValueError: it is no template, or there is no tokenizer to use it.
    """
    if tokenizer is None:
        raise ValueError("chat_template: expected None, for the model has no tokenizer")
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = template.text
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    except TemplateSyntaxError as error:
        where = "" if template.file is None else f" {template.file},"
        raise ValueError(f"chat_template:{where} line {error.lineno}: expected a Jinja template: {error}") from error
    except TemplateError:
        pass  # it refuses this conversation, and may take others
    return tokenizer


class RequestTemplates:
    """Tokenizers with the templates that requests bring, and how answers are read by these.

    The last few are kept: to find the form of calls, a template has to render some twenty conversations.
    """

    def __init__(self) -> None:
        self.of = lru_cache(maxsize=_MAX_TEMPLATES)(_read_by)


def _read_by(
    tokenizer: Any, template: ChatTemplate, calls: ToolCallParserName = "auto", reasoning: ReasoningParserName = "auto"
) -> tuple[Any, ChatFormat]:
    tokenizer = with_template(tokenizer, template)
    return tokenizer, ChatFormat.of(tokenizer, calls, reasoning)
