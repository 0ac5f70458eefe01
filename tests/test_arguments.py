"""An impossible argument is refused by its name, before anything has changed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.model_zoo import build_shallow
from support.replica_servers import tiny_llm

from radixkv import LLM, AsyncLLM, BeamSearchParams, Chat, SamplingParams, StructuredOutputsParams
from radixkv.errors import EngineError
from radixkv.prompts import ChatOptions, as_single_prompt

ONE = SamplingParams(temperature=0.0, max_tokens=1)
BEAMS = BeamSearchParams(beam_width=2, max_tokens=1)
HI = [{"role": "user", "content": "Hi."}]


@pytest.fixture(scope="module")
def llm(default_tokenizer: Any) -> LLM:
    return tiny_llm(default_tokenizer)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate({"prompt": "a", "cache": True}, ONE), "cache: expected {'read': bool, 'write': bool"),
        (lambda llm: llm.generate({"prompt": "a", "cache": ["read"]}, ONE), "cache: expected {'read': bool, 'write'"),
        (lambda llm: llm.chat(HI, ONE, cache="x" * 999), "cache: expected {'read': bool, 'write': bool}, got 'x"),
        (lambda llm: llm.chat([{"role": 5, "content": "Hi."}], ONE), "messages: expected role to be a string, got 5"),
        (lambda llm: llm.chat([{"role": None, "content": "Hi."}], ONE), "messages: expected role to be a string, got"),
        (lambda llm: llm.chat(HI, ONE, chat_template_kwargs={5: 1}), "chat_template_kwargs: 5 is not a variable"),
        (
            lambda llm: llm.chat(HI, ONE, chat_template_kwargs=[5]),
            "chat_template_kwargs: expected a dictionary, got \\[5",
        ),
        (lambda llm: llm.chat(HI, ONE, chat_template=5), "chat_template: expected a file or a Jinja template, got 5"),
        # A bar was shown for "no".
        (lambda llm: llm.generate("a", ONE, "no"), "use_tqdm: expected True, False or a function .*, got 'no'"),
        # The first message of the conversation was refused, and the conversation was not.
        (lambda llm: Chat(llm, chat_template_kwargs=5), "chat_template_kwargs: expected a dictionary, got 5"),  # type: ignore[arg-type]
        (lambda llm: llm.generate(["a"], [BEAMS]), "sampling_params: expected SamplingParams, got BeamSearchParams"),
        (lambda llm: llm.chat(HI, [BEAMS]), "sampling_params: expected SamplingParams, got BeamSearchParams"),
        (lambda llm: llm.stream("a", BEAMS), "sampling_params: expected SamplingParams, got BeamSearchParams"),
        (lambda llm: llm.stream(HI, BEAMS), "sampling_params: expected SamplingParams, got BeamSearchParams"),
        (
            lambda llm: llm.stream("a", ONE, add_generation_prompt=False, chat_template="{{ messages }}"),
            "add_generation_prompt, chat_template: expected a conversation, got a prompt",
        ),
        (lambda llm: llm.stream("a", ONE, cache_salt=5), "cache_salt: expected a string, got 5"),
        (lambda llm: llm.stream(HI, ONE, priority=0.5), "priority: expected a whole number, got 0.5"),
        (lambda llm: llm.pin([10**6]), "prompt_token_ids: 1000000 is outside the vocabulary of 49152"),
        (lambda llm: llm.pin({"prompt_token_ids": []}), "prompt_token_ids: expected a non-empty list of token ids"),
        (lambda llm: llm.explain([5, 2**31]), "prompt_token_ids: 2147483648 is outside the vocabulary of 49152"),
        (lambda llm: llm.explain([10**6]), "prompt_token_ids: 1000000 is outside the vocabulary of 49152"),
        (lambda llm: llm.shutdown("soon"), "grace_seconds: expected a number of seconds of at least 0, got 'soon'"),
        (lambda llm: llm.shutdown(-1), "grace_seconds: expected a number of seconds of at least 0, got -1"),
        (lambda _: StructuredOutputsParams(choice=5), "structured_outputs: choice must be a list of non-empty strings"),  # type: ignore[arg-type]
        (lambda _: SamplingParams(seed=np.array([1, 2])), "seed: expected a whole number"),  # type: ignore[arg-type]
        (lambda _: SamplingParams(seed=-2), "seed: expected at least -1, got -2"),
        (lambda _: SamplingParams(stop=b"x"), "stop: expected a string or a list of strings, got b'x'"),  # type: ignore[arg-type]
        (lambda _: SamplingParams(stop=np.array([1, 2])), "stop: expected non-empty strings"),  # type: ignore[arg-type]
        *(
            (
                lambda llm, several=several, call=call: list(getattr(llm, call)(several)),
                "prompt: expected one prompt or conversation, got a list of prompts, \\[",
            )
            for several in (["a", "b"], [[1, 2], [3]], [{"prompt": "a"}], [{"prompt_token_ids": [1]}])
            for call in ("explain", "stream", "pin")
        ),
        (lambda llm: llm.generate([[5, 10**30]], ONE), "prompt_token_ids: 1000.* is outside the vocabulary of 49152"),
        (lambda llm: llm.generate([[2**63, -1]], ONE), "prompt_token_ids: 9223372036854775808 is outside the vocab"),
        (lambda llm: llm.generate([[True, True]], ONE), "prompt_token_ids: expected whole numbers, got \\[True, T"),
        (
            lambda _: LLM(build_shallow("llama"), num_blocks=8, record_trace="/no/such/x"),
            "record_trace: expected a file that can be written, got '/no/such/x': No such file or directory",
        ),
        (lambda _: LLM("/no/such/model", dtype=[]), "dtype: expected 'auto' or one of"),
        (lambda _: LLM("a name with spaces"), "model: expected a hub id .*, got 'a name with spaces'"),
        (lambda llm: AsyncLLM(llm, tenants=["a"]), "tenants: expected a TenantShare for each name, got \\['a'\\]"),  # type: ignore[arg-type]
        (lambda llm: AsyncLLM(llm, tenants={"a": 1}), "tenants: expected a TenantShare for each name"),  # type: ignore[dict-item]
        (lambda llm: LLM(llm.engine.loaded.model, tokenizer="/nowhere"), "tokenizer: expected .*there is no such"),
        (lambda llm: LLM(llm.engine.loaded.model, tokenizer=3), "tokenizer: expected one of transformers, .*, got 3"),
    ],
)
def test_a_bad_argument_is_named_and_changes_nothing(llm: LLM, call: Callable[[LLM], Any], message: str) -> None:
    num_held_blocks = llm.engine.cache.num_held_blocks
    with pytest.raises((TypeError, ValueError, EngineError, OSError), match=f"^{message}") as refusal:
        call(llm)
    assert len(str(refusal.value)) < 400
    assert llm.engine.cache.num_held_blocks == num_held_blocks


@pytest.mark.parametrize("prompt", ["a", [5, 6], {"prompt": "a"}])
def test_one_prompt_takes_no_options_of_a_conversation(llm: LLM, prompt: Any) -> None:
    """They were ignored."""
    options = ChatOptions(chat_template_kwargs={}, add_generation_prompt=False)
    with pytest.raises(
        ValueError, match=r"^add_generation_prompt, chat_template_kwargs: expected a conversation, got a prompt$"
    ):
        as_single_prompt(prompt, llm.engine.loaded, options=options)


def test_a_stream_takes_what_one_chat_takes(llm: LLM) -> None:
    """It had no options of the cache, no priority, no template, and could not continue a message."""
    of_chat, of_stream = (set(inspect.signature(call).parameters) for call in (LLM.chat, LLM.stream))
    assert of_chat - {"messages", "use_tqdm"} == of_stream - {"prompt"}
    begun = [*HI, {"role": "assistant", "content": "Good"}]
    options: dict[str, Any] = {
        "add_generation_prompt": False,
        "continue_final_message": True,
        "chat_template": "{% for message in messages %}{{ message['content'] }} {% endfor %}",
        "cache_salt": "streams",
        "priority": 3,
    }
    (whole,) = llm.chat(begun, ONE, False, **options, cache={"read": False, "write": False})
    assert llm.explain(whole.prompt_token_ids, cache_salt="streams").num_reused_tokens == 0
    pieces = list(llm.stream(begun, ONE, **options))
    assert pieces[-1].prompt == whole.prompt == "Hi. Good"
    assert [token for piece in pieces for token in piece.outputs[0].token_ids] == whole.outputs[0].token_ids
    for salt, is_cached in (("streams", True), ("others", False)):
        explained = llm.explain(whole.prompt_token_ids, cache_salt=salt)
        assert (explained.num_reused_tokens > 0) == is_cached
    prompt = [7, 8, 9, 10, 11, 12]
    assert [piece.finished for piece in llm.stream(prompt, ONE, cache_salt="streams", cache={"write": False})][-1]
    assert llm.explain(prompt, cache_salt="streams").num_reused_tokens == 0


async def test_a_refused_call_of_an_async_llm_names_the_argument(llm: LLM) -> None:
    async with AsyncLLM(llm) as engine:
        for tenant in ([], {}, 5, None):
            options: Any = {"tenant": tenant}
            for call in (engine.generate("a", ONE, **options), engine.chat(HI, ONE, **options)):
                with pytest.raises(TypeError, match=r"^tenant: expected a string"):
                    await anext(call)
            with pytest.raises(TypeError, match=r"^tenant: expected a string"):
                await engine.beam_search("a", BEAMS, **options)
        wrong: Any = None
        with pytest.raises(ValueError, match=r"^grace_seconds: expected a number of seconds of at least 0, got None"):
            await engine.shutdown(wrong)
        # It still takes requests.
        assert [piece async for piece in engine.generate("a", ONE)][-1].finished
