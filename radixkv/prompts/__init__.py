"""Prompts and messages as users pass them, converted to token ids: one form for `LLM`, `AsyncLLM` and the server.

::

    prompt.py               text and token ids
    conversation.py         messages, which a chat template writes; chat_options.py: how
    single.py               one of either
"""

from radixkv.prompts.chat_options import ChatOptions
from radixkv.prompts.conversation import (
    Message,
    as_chat_prompts,
    as_conversations,
    as_template_message,
    render_chat,
)
from radixkv.prompts.prompt import (
    Prompt,
    PromptInput,
    TextPrompt,
    TokensPrompt,
    as_prompts,
    cache_options,
    is_token_ids,
    one_for_each,
    tokenize,
    tokenize_bad_words,
    with_answer_form,
)
from radixkv.prompts.single import as_single_prompt, is_prompt

__all__ = [
    "ChatOptions",
    "Message",
    "Prompt",
    "PromptInput",
    "TextPrompt",
    "TokensPrompt",
    "as_chat_prompts",
    "as_conversations",
    "as_prompts",
    "as_single_prompt",
    "as_template_message",
    "cache_options",
    "is_prompt",
    "is_token_ids",
    "one_for_each",
    "render_chat",
    "tokenize",
    "tokenize_bad_words",
    "with_answer_form",
]
