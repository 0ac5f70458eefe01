"""Chat templates in the manner of families of models, and a small tokenizer with their special tokens."""

from __future__ import annotations

from types import MappingProxyType

import transformers
from support.model_zoo import build
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from radixkv import LLM
from radixkv.model.text_interface import TextInterface
from radixkv.tools.chat_format import ChatFormat

_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n{% endif %}{{ message.content }}"
    "CALLS<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\nTHINK{% endif %}"
)
_TOOLS = "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}. Form: FORM<|im_end|>\n{% endif %}"
_CALLS = "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"


def _template(form: str, think: str = "") -> str:
    return _TOOLS.replace("FORM", form) + _CHATML.replace("CALLS", _CALLS).replace("THINK", think)


# By the name of the form of calls; "think_open" is Qwen 3's thinking form, "think_switch" has its switch.
TEMPLATES = MappingProxyType(
    {
        "hermes": _template("<tool_call></tool_call>"),
        "think_switch": _template(
            "<tool_call></tool_call>", "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
        ),
        "think_open": _template("<tool_call></tool_call>", "<think>\n"),
        "qwen3_coder": _template("<tool_call><function=a><parameter=b></parameter></function></tool_call>"),
        "glm": _template("<tool_call>a<arg_key>b</arg_key><arg_value>c</arg_value></tool_call>"),
        "llama3_json": _template(
            'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
        )
        .replace("<tool_call>{{", "{{")
        .replace("}}</tool_call>", "}}"),
        "mistral": _template("[TOOL_CALLS]").replace("<tool_call>", "").replace("</tool_call>", ""),
        "mistral_v11": _template("[TOOL_CALLS]a[ARGS]").replace("<tool_call>", "").replace("</tool_call>", ""),
        "deepseek_v3": _template("<｜tool▁calls▁begin｜>```json"),
        "deepseek_v31": _template("<｜tool▁calls▁begin｜>"),
        "harmony": (
            "<|start|>system<|message|>Reasoning: {{ reasoning_effort }}<|end|>"
            "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}"
            "{% for message in messages %}<|start|>{{ message.role }}"
            "{% if message.thinking %}<|channel|>analysis<|message|>{{ message.thinking }}<|end|>{% endif %}"
            "<|message|>{{ message.content }}<|end|>{% endfor %}"
            "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
        ),
        "json": "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}",
    }
)

# Templates that know no tools and insist that the user and the assistant take turns: in the manner of Gemma 2's, which
# refuses a system message, and of Gemma 3's, which writes it at the beginning of the user's.
_TURNS = (
    "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{% if loop.first %}{{ first }}{% endif %}{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>model\n{% endif %}"
)
STRICT_TURNS = MappingProxyType(
    {
        "gemma2": (
            "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
            + _TURNS
        ),
        "gemma3": (
            "{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}"
            "{% set messages = messages[1:] %}{% endif %}" + _TURNS
        ),
    }
)

_SPECIAL = (
    "<|im_start|> <|im_end|> [TOOL_CALLS] [ARGS] [CALL_ID] [THINK] [/THINK] <|python_tag|> <|start|> <|channel|> <|message|> "
    "<|end|> <|call|> <|return|> <|constrain|>"
).split()
_PLAIN = (
    "<tool_call> </tool_call> <think> </think> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> "
    "<｜tool▁call▁end｜> <｜tool▁sep｜>"
).split()
# GLM's alone: random models of the other templates keep the vocabularies with which their answers are as tests need them.
_GLM = "<arg_key> </arg_key> <arg_value> </arg_value>".split()


def make_tokenizer(template: str, *, with_markers: bool = True) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of bytes, with a chat template.

    Args:
        with_markers: whether the markers of all families are tokens of their own; as with them, some are special.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({character: index for index, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True) for text in (_SPECIAL if with_markers else _SPECIAL[:2])]
    )
    if with_markers:
        plain = [*_PLAIN, *(_GLM if _GLM[0] in template else [])]
        tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=template
    )


def text_interface(template: str) -> TextInterface:
    """What a server knows of a model with this template."""
    tokenizer = make_tokenizer(template)
    return TextInterface(tokenizer, "model", 1000, len(tokenizer), frozenset(), ChatFormat.of(tokenizer), {})


def speaker(template: str, **options: int) -> LLM:
    """A tiny random model that speaks like the family of this template.

    Args:
        options: of the model's configuration.
    """
    tokenizer = make_tokenizer(template)
    model = build("llama", {"vocab_size": len(tokenizer), "max_position_embeddings": 1024, **options})
    return LLM(model, tokenizer=tokenizer, num_blocks=400, block_size=16)
