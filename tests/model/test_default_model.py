"""End to end on the real default model, against transformers on the same weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from radixkv import LLM, BeamSearchParams, Chat, SamplingParams
from radixkv.model.default_model import find_default_model
from radixkv.model.gguf.conversion import ensure_converted

SYSTEM = "You are a helpful librarian. Answer briefly and politely, and never invent a book. " * 3
QUESTIONS = ["What is the capital of France?", "Name three colours.", "Who wrote Hamlet?", "Count to five."]


@pytest.fixture
def llm(default_llm: LLM) -> LLM:
    return default_llm


@pytest.fixture(scope="module")
def reference() -> Any:
    folder = ensure_converted(find_default_model(), print)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def messages(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


@torch.inference_mode()
def likeliest_after(model: Any, prompt: list[int], answer: list[int]) -> list[int]:
    """The model's likeliest token at each position of an answer; if all are the answer's own, it is what `generate` gives."""
    logits = model(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
    likeliest: list[int] = logits.argmax(-1).tolist()
    return likeliest


def test_a_question_is_answered(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=30)
    output = llm.chat([{"role": "user", "content": QUESTIONS[0]}], params, use_tqdm=False)[0].outputs[0]
    assert "Paris" in output.text
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    assert "<|im_end|>" not in output.text


def test_greedy_tokens_equal_generate_uncached_and_cached(llm: LLM, reference: Any) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    conversations = [messages(question) for question in QUESTIONS]
    cold = llm.chat(conversations, params, use_tqdm=False)
    cached = llm.chat(conversations, params, use_tqdm=False)
    for first, second in zip(cold, cached, strict=True):
        answer = first.outputs[0].token_ids
        assert len(answer) == 10
        assert answer == likeliest_after(reference, first.prompt_token_ids, answer)
        assert second.outputs[0].token_ids == first.outputs[0].token_ids
        assert second.num_cached_tokens == len(second.prompt_token_ids) - 1
    assert sum(output.num_cached_tokens for output in cold) > 3 * 40


@pytest.mark.parametrize(
    ("text", "max_tokens", "width", "length_penalty"),
    [
        ("The best thing about a library is", 8, 1, 1.0),
        ("The best thing about a library is", 12, 4, 1.0),
        # One beam ends at once, and the penalty decides whether it is among the best.
        ("Yes. No. The end.", 5, 4, 0.0),
        ("Yes. No. The end.", 5, 4, 2.0),
    ],
)
def test_beam_search_equals_transformers(
    llm: LLM, reference: Any, text: str, max_tokens: int, width: int, length_penalty: float
) -> None:
    params = BeamSearchParams(width, max_tokens, length_penalty=length_penalty)
    beams = llm.beam_search(text, params)[0].sequences
    prompt = torch.tensor([llm.get_tokenizer()(text)["input_ids"]])
    expected = reference.generate(
        prompt,
        max_new_tokens=max_tokens,
        num_beams=width,
        num_return_sequences=width,
        length_penalty=length_penalty,
        do_sample=False,
    )
    for beam, tokens in zip(beams, expected.tolist(), strict=True):
        assert beam.tokens == tokens[: len(beam.tokens)]
    assert llm.engine.cache.stats.forked_tables > 0 or width == 1
    if text.startswith("Yes"):
        assert (beams[0].finish_reason == "stop") == (length_penalty == 0.0)


def test_logprobs_equal_the_models_own(llm: LLM, reference: Any) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    output = llm.generate("The sea is blue because", params, use_tqdm=False)[0]
    tokens = output.prompt_token_ids + output.outputs[0].token_ids
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0].log_softmax(-1)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    logprobs = output.prompt_logprobs[1:] + (output.outputs[0].logprobs or [])
    for position, entry in enumerate(logprobs):
        token = tokens[position + 1]
        assert entry is not None
        assert entry[token].logprob == pytest.approx(float(expected[position, token]), abs=1e-3)
        assert int(expected[position].argmax()) in entry
    chosen = [entry[token].logprob for entry, token in zip(logprobs[-8:], tokens[-8:], strict=True)]  # type: ignore[index]
    assert output.outputs[0].cumulative_logprob == pytest.approx(sum(chosen))


def test_stop_strings_stop_tokens_and_min_tokens(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    prompt = "One, two, three, four, five, six, seven,"

    def complete(**options: Any) -> Any:
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **options})
        return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]

    full = complete()
    word = full.text.split(",")[1]
    stopped = complete(stop=[word])
    assert stopped.text == full.text[: full.text.index(word)]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", word)
    assert complete(stop=[word], include_stop_str_in_output=True).text.endswith(word)
    comma = tokenizer(",", add_special_tokens=False)["input_ids"][0]
    stopped = complete(stop_token_ids=[comma])
    assert (stopped.stop_reason, stopped.token_ids[-1]) == (comma, comma)
    assert stopped.text == full.text[: full.text.index(",")]
    assert complete(stop_token_ids=[comma], include_stop_str_in_output=True).text == stopped.text + ","
    late = complete(stop_token_ids=[comma], min_tokens=10)
    assert comma not in late.token_ids[:10]
    later = complete(stop=[word, "ten"], min_tokens=8)
    assert word in later.text
    assert (full.finish_reason, len(full.token_ids)) == ("length", 24)


def test_a_token_that_ends_an_answer_is_whole_in_its_text(llm: LLM) -> None:
    """A stop string in its text used to cut the text there, although the token had ended the answer."""
    (token,) = llm.get_tokenizer()(" eight", add_special_tokens=False)["input_ids"]
    params = SamplingParams(
        temperature=0, stop=["eig"], stop_token_ids=[token], logit_bias={token: 100}, include_stop_str_in_output=True
    )
    (output,) = llm.generate("Seven,", params, use_tqdm=False)[0].outputs
    assert (output.text, output.finish_reason, output.stop_reason) == (" eight", "stop", token)


def test_stop_strings_end_beams(llm: LLM) -> None:
    params = BeamSearchParams(3, 24, stop=[","], logprobs=2)
    for beam in llm.beam_search("One, two, three, four", params)[0].sequences:
        assert beam.stop_reason == "," or beam.finish_reason == "length"
        generated = beam.tokens[-len(beam.logprobs) :]
        total = sum(entry[token].logprob for entry, token in zip(beam.logprobs, generated, strict=True))
        assert total == pytest.approx(beam.cum_logprob, abs=1e-3)


def test_every_turn_of_a_chat_reuses_all_before_it(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12)
    chat = Chat(llm, SYSTEM, params)
    num_cached = 0
    for question in QUESTIONS:
        assert chat.send(question)
        output = chat.last_output
        assert output is not None
        # The answer's last token was never computed, so all but it is cached.
        assert output.num_cached_tokens >= num_cached - 1
        num_cached = len(output.prompt_token_ids) + chat.last_num_tokens
    assert [message["role"] for message in chat.history] == ["system"] + ["user", "assistant"] * 4
    other = chat.fork()
    assert chat.send("Say it again.") == other.send("Say it again.")
    assert other.last_output is not None
    assert other.last_output.num_cached_tokens == len(other.last_output.prompt_token_ids) - 1


def test_the_last_output_of_a_chat_has_all_of_the_answer(llm: LLM) -> None:
    """It had only the last token of it, with the text and the log-probabilities of that one."""
    chat = Chat(llm, SYSTEM)
    text = chat.send(QUESTIONS[0], SamplingParams(temperature=0.0, max_tokens=6, logprobs=0))
    assert chat.last_output is not None
    (answer,) = chat.last_output.outputs
    assert (answer.text, len(answer.token_ids), len(answer.logprobs or ())) == (text, 6, 6)
    total = sum(entry[token].logprob for entry, token in zip(answer.logprobs or (), answer.token_ids, strict=True))
    assert answer.cumulative_logprob == pytest.approx(total, abs=1e-5)


def test_of_two_turns_at_a_time_the_later_one_is_refused(llm: LLM) -> None:
    chat = Chat(llm, SYSTEM, SamplingParams(temperature=0.0, max_tokens=3))
    stream = chat.stream("What is a tree?")
    next(stream)
    answer = chat.send("What is a leaf?")
    with pytest.raises(RuntimeError, match=r"another turn joined the conversation .* fork\(\) it"):
        list(stream)
    assert [message["content"] for message in chat.history[1:]] == ["What is a leaf?", answer]
    other = chat.fork()
    assert (other.answer, other.last_output) == (chat.answer, chat.last_output)
    assert other.last_num_tokens == chat.last_num_tokens > 0


def test_an_abandoned_turn_leaves_the_chat_unchanged(llm: LLM) -> None:
    chat = Chat(llm, SYSTEM)
    next(chat.stream(QUESTIONS[0]))
    assert [message["role"] for message in chat.history] == ["system"]
    assert (chat.last_output, chat.last_num_tokens) == (None, 0)
    with pytest.raises(ValueError, match="n=2"):
        chat.send("Hi", SamplingParams(n=2))
    with pytest.raises(ValueError, match="a conversation keeps text, expected detokenize=True, got False"):
        chat.send("Hi", SamplingParams(detokenize=False))


@pytest.mark.parametrize(
    ("prompts", "error", "message"),
    [
        ("", ValueError, "at least one"),
        ([1, None, 3], TypeError, r"prompt_token_ids: expected whole numbers, got \[1, None, 3\]"),
        ({"prompt_token_ids": [True, 5]}, TypeError, r"prompt_token_ids: expected whole numbers, got \[True, 5\]"),
        (7, TypeError, "prompts"),
        ({"text": "x"}, ValueError, "'prompt'"),
        (
            [{"role": "user", "content": "x"}],
            ValueError,
            r"got a message of a conversation, which is for chat\(\): {'role'",
        ),
        ({"prompt": "x", "cache": {"red": True}}, ValueError, "cache"),
        ({"prompt": "x", "cache_salt": 3}, TypeError, "cache_salt"),
        ({"prompt": "x", "cache_salt": "y\ud83d"}, ValueError, "cache_salt: character 1 is half of a surrogate pair"),
        ("x\ud83d", ValueError, "prompts: character 1 is half of a surrogate pair"),
    ],
)
def test_invalid_prompts_are_refused(llm: LLM, prompts: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        llm.generate(prompts, use_tqdm=False)


def test_parameters_of_another_type_are_named(llm: LLM) -> None:
    with pytest.raises(TypeError, match="sampling_params: expected SamplingParams, got dict"):
        llm.generate("x", {"temperature": 0}, use_tqdm=False)  # type: ignore[arg-type]


def test_a_search_keeps_the_places_of_beams_that_ended(llm: LLM) -> None:
    """Stop strings reduce its beams for a while, until it grows again: others must not be admitted in their place."""
    most = llm.engine.max_num_seqs
    params = BeamSearchParams(beam_width=3, max_tokens=8, stop=[*"abcdefgh"])
    llm.beam_search([f"{number} is" for number in range(most // 3 + 10)], params)
    assert llm.engine.last_batch.num_sequences <= most


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.pin(5), "prompt: expected a string, token ids, a dictionary or a list of messages, got int"),
        (
            lambda llm: llm.explain(b"x"),
            "prompt: expected a string, token ids, a dictionary or a list of messages, got bytes",
        ),
        (
            lambda llm: llm.stream(None),
            "prompt: expected a string, token ids, a dictionary or a list of messages, got NoneType",
        ),
        (lambda _: Chat("x"), "llm: expected an LLM, got str"),
        (lambda llm: Chat(llm, system=5), "system: expected a string or None, got 5"),
        (lambda llm: Chat(llm, cache_salt=5), "cache_salt: expected a string, got 5"),
        (lambda llm: Chat(llm, None, "x"), "sampling_params: expected SamplingParams, got str"),
        (lambda llm: Chat(llm).send("Hi", "x"), "sampling_params: expected SamplingParams, got str"),
    ],
)
def test_arguments_of_other_types_are_named(llm: LLM, call: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call(llm)


def test_messages_may_come_in_parts(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4)
    parts = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Who are you?"}]
    full = llm.chat([{"role": "user", "content": "Be brief.\nWho are you?"}], params, use_tqdm=False)
    in_parts = llm.chat([{"role": "user", "content": parts}], params, use_tqdm=False)
    assert in_parts[0].prompt == full[0].prompt
    assert in_parts[0].outputs[0].text == full[0].outputs[0].text


def test_the_last_message_may_be_continued(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6)
    unfinished = [{"role": "user", "content": QUESTIONS[0]}, {"role": "assistant", "content": "The capital of France"}]
    (output,) = llm.chat(unfinished, params, use_tqdm=False, add_generation_prompt=False, continue_final_message=True)
    assert output.prompt is not None
    assert output.prompt.endswith(f"{QUESTIONS[0]}<|im_end|>\n<|im_start|>assistant\nThe capital of France")
    assert output.outputs[0].text.startswith(" is Paris")
    (plain,) = llm.chat(unfinished, params, use_tqdm=False, add_generation_prompt=False)
    assert plain.prompt == f"{output.prompt}<|im_end|>\n"


@pytest.mark.parametrize(
    ("content", "options", "error", "message"),
    [
        ("The", {}, ValueError, "continue_final_message: only for add_generation_prompt=False"),
        (None, {"add_generation_prompt": False}, ValueError, "continue_final_message: the last message has no text"),
        (" ", {"add_generation_prompt": False}, ValueError, "continue_final_message: the last message has no text"),
        ("The", {"add_generation_prompt": 0}, TypeError, "add_generation_prompt: expected True or False, got 0"),
    ],
)
def test_messages_that_cannot_be_continued_are_refused(
    llm: LLM, content: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    conversation = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]
    with pytest.raises(error, match=message):
        llm.chat(conversation, use_tqdm=False, continue_final_message=True, **options)
    with pytest.raises(ValueError, match=r"continue_final_message: expected .* got role 'user'"):
        llm.chat(conversation[:1], use_tqdm=False, add_generation_prompt=False, continue_final_message=True)


def test_the_developer_role_is_the_system_role(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=1)
    prompts = [
        llm.chat([{"role": role, "content": SYSTEM}, *messages("Hi")[1:]], params, use_tqdm=False)[0].prompt
        for role in ("system", "developer")
    ]
    assert prompts[0] == prompts[1]


@pytest.mark.parametrize(
    "conversation",
    [
        [],
        [[]],
        [{"role": "user"}],
        "hello",
        [["hello"]],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": ["hello"]}],
        [{"role": "user", "content": "\ud83d"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    ],
)
def test_invalid_messages_are_refused(llm: LLM, conversation: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="messages"):
        llm.chat(conversation, use_tqdm=False)
