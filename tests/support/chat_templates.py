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


def written_calls(call: str, begin: str = "", between: str = "", end: str = "") -> str:
    """The part of a template that writes an assistant's calls.

    Args:
        call: a template for one, which is named ``call``.
    """
    between = f"{{% if not loop.last %}}{between}{{% endif %}}" if between else ""
    each = f"{{% for call in message.tool_calls %}}{call}{between}{{% endfor %}}"
    return f"{{% if message.tool_calls %}}{begin}{each}{end}{{% endif %}}"


_JSON = "{{ call.function | tojson }}"
_NAME, _ARGUMENTS = "{{ call.function.name }}", "{{ call.function.arguments | tojson }}"


def _elements(element: str) -> str:
    return f"{{% for key, value in call.function.arguments | items %}}{element}{{% endfor %}}"


_VALUE = "{{ value if value is string else value | tojson }}"
_CALLS = written_calls(f"<tool_call>{_JSON}</tool_call>")


def chatml(form: str, calls: str = _CALLS, think: str = "") -> str:
    """A template that describes tools, and writes earlier calls.

    Args:
        form: how it describes the form of calls.
        calls: the part that writes them.
        think: ends its generation prompt.
    """
    return _TOOLS.replace("FORM", form) + _CHATML.replace("CALLS", calls).replace("THINK", think)


# By the name of the form of calls; "think_open" is Qwen 3's thinking form, "think_switch" has its switch.
KNOWN = MappingProxyType(
    {
        "hermes": chatml("<tool_call></tool_call>"),
        "think_switch": chatml(
            "<tool_call></tool_call>", think="{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
        ),
        "think_open": chatml("<tool_call></tool_call>", think="<think>\n"),
        "qwen3_coder": chatml(
            "<tool_call><function=a><parameter=b></parameter></function></tool_call>",
            written_calls(
                f"<tool_call>\n<function={_NAME}>\n"
                + _elements(f"<parameter={{{{ key }}}}>\n{_VALUE}\n</parameter>\n")
                + "</function>\n</tool_call>",
                between="\n",
            ),
        ),
        "glm": chatml(
            "<tool_call>a<arg_key>b</arg_key><arg_value>c</arg_value></tool_call>",
            written_calls(
                f"<tool_call>{_NAME}\n"
                + _elements(f"<arg_key>{{{{ key }}}}</arg_key>\n<arg_value>{_VALUE}</arg_value>\n")
                + "</tool_call>",
                between="\n",
            ),
        ),
        "llama3_json": chatml(
            'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.',
            written_calls(_JSON),
        ),
        "mistral_v3": chatml("[TOOL_CALLS]", written_calls(_JSON, "[TOOL_CALLS][", ", ", "]")),
        "mistral_v11": chatml("[TOOL_CALLS]a[ARGS]", written_calls(f"[TOOL_CALLS]{_NAME}[ARGS]{_ARGUMENTS}")),
        "deepseek_v3": chatml(
            "<｜tool▁calls▁begin｜>```json",
            written_calls(
                f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{_NAME}\n```json\n{_ARGUMENTS}\n```<｜tool▁call▁end｜>",
                "<｜tool▁calls▁begin｜>",
                "\n",
                "<｜tool▁calls▁end｜>",
            ),
        ),
        "deepseek_v31": chatml(
            "<｜tool▁calls▁begin｜>",
            written_calls(
                f"<｜tool▁call▁begin｜>{_NAME}<｜tool▁sep｜>{_ARGUMENTS}<｜tool▁call▁end｜>",
                "<｜tool▁calls▁begin｜>",
                "",
                "<｜tool▁calls▁end｜>",
            ),
        ),
        "harmony": (
            "<|start|>system<|message|>Reasoning: {{ reasoning_effort }}<|end|>"
            "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}"
            "{% for message in messages %}<|start|>{{ message.role }}"
            "{% if message.thinking %}<|channel|>analysis<|message|>{{ message.thinking }}<|end|>{% endif %}"
            "<|message|>{{ message.content }}<|end|>{% endfor %}"
            "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
        ),
        "lfm2": chatml("<|tool_call_start|><|tool_call_end|>", ""),
        "olmo3": chatml(
            "<functions></functions>",
            written_calls(
                f"{_NAME}(" + _elements("{{ key }}={{ value | tojson }}{% if not loop.last %}, {% endif %}") + ")",
                "<function_calls>",
                "\n",
                "</function_calls>",
            ),
        ),
        "json": "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}",
    }
)

# Objects and lists in a notation of their own, in the manner of Gemma 4's and MiniMax-M3's templates.
_GEMMA = (
    '{% macro write(value) %}{% if value is string %}<|"|>{{ value }}<|"|>'
    "{% elif value is mapping %}{ {%- for key, each in value | items %}{{ key }}:{{ write(each) }}"
    "{% if not loop.last %},{% endif %}{% endfor %}}"
    "{% elif value is iterable %}[{% for each in value %}{{ write(each) }}{% if not loop.last %},{% endif %}{% endfor %}]"
    "{% else %}{{ value | tojson }}{% endif %}{% endmacro %}"
)
_MINIMAX_M3 = (
    "{% macro write(value) %}{% if value is string %}{{ value }}"
    "{% elif value is mapping %}{% for key, each in value | items %}"
    "]m[<{{ key }}>{{ write(each) }}]m[</{{ key }}>{% endfor %}"
    "{% elif value is iterable %}{% for each in value %}]m[<item>{{ write(each) }}]m[</item>{% endfor %}"
    "{% else %}{{ value | tojson }}{% endif %}{% endmacro %}"
)

# Forms that are derived from the template, by the family in whose manner it is.
DERIVED = MappingProxyType(
    {
        "kimi": chatml(
            "",
            written_calls(
                f"<|tool_call_begin|>{{{{ call.id }}}}<|tool_call_argument_begin|>{_ARGUMENTS}<|tool_call_end|>",
                begin="<|tool_calls_section_begin|>",
                end="<|tool_calls_section_end|>",
            ),
        ),
        "command": chatml(
            "",
            written_calls(
                f'\n    {{"tool_call_id": "{{{{ loop.index0 }}}}", "tool_name": "{_NAME}", "parameters": {_ARGUMENTS}}}',
                begin="<|START_ACTION|>[",
                between=",",
                end="\n]<|END_ACTION|>",
            ),
        ),
        "minimax": chatml(
            "",
            written_calls(
                f'<invoke name="{_NAME}">\n'
                + _elements(f'<parameter name="{{{{ key }}}}">{_VALUE}</parameter>\n')
                + "</invoke>\n",
                begin="\n<minimax:tool_call>\n",
                end="</minimax:tool_call>",
            ),
        ),
        "gemma": _GEMMA
        + chatml("", written_calls(f"<|tool_call>call:{_NAME}{{{{ write(call.function.arguments) }}}}<tool_call|>")),
        "minimax_m3": _MINIMAX_M3
        + chatml(
            "",
            written_calls(
                f']m[<invoke name="{_NAME}">{{{{ write(call.function.arguments) }}}}]m[</invoke>\n',
                begin="]m[<tool_call>\n",
                end="]m[</tool_call>",
            ),
        ),
    }
)
TEMPLATES = MappingProxyType({**KNOWN, **DERIVED})

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
# Only of templates that have them: random models of the others keep the vocabularies with which their answers are as tests
# need them.
_OF_SOME = (
    "<arg_key> </arg_key> <arg_value> </arg_value> <minimax:tool_call> </minimax:tool_call> <|START_ACTION|> <|END_ACTION|> "
    "]m[ <|tool_call> <tool_call|> <function_calls> </function_calls>"
).split()
_SPECIAL_OF_SOME = (
    "<|tool_calls_section_begin|> <|tool_calls_section_end|> <|tool_call_begin|> <|tool_call_argument_begin|> "
    '<|tool_call_end|> <|"|> <|tool_call_start|>'
).split()


def make_tokenizer(template: str, *, with_markers: bool = True) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of bytes, with a chat template.

    Args:
        with_markers: whether the markers of all families are tokens of their own; as with them, some are special.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({character: index for index, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [*_SPECIAL, *(text for text in _SPECIAL_OF_SOME if text in template)] if with_markers else _SPECIAL[:2]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    if with_markers:
        plain = [*_PLAIN, *(text for text in _OF_SOME if text in template)]
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
