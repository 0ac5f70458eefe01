"""A small tokenizer as Llama 2's, Mistral's and Phi-3's are: its decoder drops the leading space of a text."""

from __future__ import annotations

import tokenizers
from transformers import PreTrainedTokenizerFast

_WORDS = [
    "▁",
    "H",
    "e",
    "l",
    "o",
    "w",
    "r",
    "d",
    "!",
    "▁w",
    "▁H",
    "He",
    "▁He",
    "ll",
    "▁Hello",
    "or",
    "▁wor",
    "ld",
    "▁world",
]
_MERGES = [
    ("▁", "w"),
    ("▁", "H"),
    ("▁H", "e"),
    ("l", "l"),
    ("▁He", "llo"),
    ("ll", "o"),
    ("o", "r"),
    ("▁w", "or"),
    ("l", "d"),
    ("▁wor", "ld"),
]


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer: of a few words, with bytes for all that they lack, and ``<s>`` before each text."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *_WORDS, "llo"]
    decoders, normalizers = tokenizers.decoders, tokenizers.normalizers
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            {name: token_id for token_id, name in enumerate(names)}, _MERGES, unk_token="<unk>", byte_fallback=True
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.chat_template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    return fast
