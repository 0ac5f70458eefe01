"""Conversations of asyncio programs: the same as those of `Chat`, and turns that do not join them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest
from support.async_streams import running_llm, until
from support.example_tools import ADD, WEATHER
from support.held_steps import HeldSteps
from support.replica_servers import tiny_llm
from support.time_limit import HANGING

from radixkv import LLM, AsyncChat, AsyncLLM, Chat, SamplingParams
from radixkv.errors import PromptTooLongError, StepFailedError
from radixkv.serving import conversation

SYSTEM = "You are a patient teacher. Answer in one sentence."
QUESTIONS = ["What is a tree?", "And a forest?", "Who are you?"]
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=20)
ENDLESS = SamplingParams(seed=1, max_tokens=1000, ignore_eos=True)


def facts(chat: Chat | AsyncChat) -> tuple[Any, ...]:
    """What the last turn did, its answer's tokens at the end of the next one's prompt."""
    output = chat.last_output
    assert output is not None
    (answer,) = output.outputs
    return output.prompt_token_ids, output.num_cached_tokens, answer.token_ids, chat.answer, chat.history


async def test_every_turn_is_that_of_a_chat_to_the_token(llm: LLM) -> None:
    offline = Chat(llm, SYSTEM, PARAMS, "salt")
    expected = [(offline.send(question), *facts(offline)) for question in QUESTIONS]
    again = offline.fork().send("Say it again.")
    llm.reset_prefix_cache()
    async with running_llm(llm) as engine:
        chat = AsyncChat(engine, SYSTEM, PARAMS, "salt")
        for question, turn in zip(QUESTIONS, expected, strict=True):
            text = "".join([piece async for piece in chat.stream(question)])
            assert (text, *facts(chat)) == turn
        other = chat.fork()
        assert await asyncio.gather(chat.send("Say it again."), other.send("Say it again.")) == [again] * 2
        assert len(chat.history) == len(other.history) == 9
        assert await engine.reset_prefix_cache()


async def test_a_conversation_that_was_stored_goes_on_where_it_was(llm: LLM) -> None:
    offline = Chat(llm, SYSTEM, PARAMS)
    offline.send("Hi")
    stored = json.loads(json.dumps(offline.history))
    again = Chat(llm, sampling_params=PARAMS, history=stored)
    assert again.history == stored
    stored[0]["content"] = "another"
    before = offline.history
    answer = again.send("And then?")
    (output,) = llm.chat([*before, {"role": "user", "content": "And then?"}], PARAMS, use_tqdm=False)
    assert output.outputs[0].text == answer
    assert again.history[:-2] == before
    async with running_llm(llm) as engine:
        assert await AsyncChat(engine, sampling_params=PARAMS, history=before).send("And then?") == answer


@pytest.mark.parametrize(
    ("history", "message"),
    [
        ("Hi", "history: expected a list of messages, got 'Hi'"),
        ([{"role": "user"}], "history: expected a dictionary with 'role' and 'content', got {'role': 'user'}"),
        ([[{"role": "user", "content": "Hi"}]], "history: expected a dictionary with 'role' and 'content', got "),
        (
            [{"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": {"name": "f"}}]}],
            "history: expected it to end with no tool calls, or with their results",
        ),
    ],
)
def test_what_is_no_history_is_refused(llm: LLM, history: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        Chat(llm, history=history)
    with pytest.raises(ValueError, match=r"^system: expected None with history, which has its own, got 'x'$"):
        Chat(llm, "x", history=[{"role": "user", "content": "Hi"}])


async def test_a_chat_calls_a_tool_and_goes_on_with_its_result(llm: LLM) -> None:
    options: Any = {"sampling_params": PARAMS, "tools": [WEATHER, ADD], "parallel_tool_calls": False}
    to_add: Any = {"type": "function", "function": {"name": "add"}}
    offline = Chat(llm, **options)
    offline.send("What is 3 plus 4?", SamplingParams(seed=1, max_tokens=60), tool_choice=to_add)
    assert offline.answer is not None
    (expected,) = offline.answer.tool_calls
    answer = offline.send_results({expected.id: "7"})
    async with running_llm(llm) as engine:
        chat = AsyncChat(engine, **options)
        assert await chat.send("What is 3 plus 4?", SamplingParams(seed=1, max_tokens=60), tool_choice=to_add) == ""
        assert chat.answer is not None
        (call,) = chat.answer.tool_calls
        assert (call.name, call.arguments) == (expected.name, expected.arguments)
        with pytest.raises(ValueError, match=r"send_results\(\) comes first"):
            chat.stream("And?")
        assert await chat.send_results({call.id: "7"}) == answer
        assert [message["role"] for message in chat.history] == ["user", "assistant", "tool", "assistant"]


async def test_prompts_are_written_and_tokenized_in_the_tokenizer_s_thread(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the event loop, a long conversation would hold up every other stream."""
    threads = set()

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def note(*arguments: Any, **options: Any) -> Any:
            threads.add(threading.current_thread().name)
            return function(*arguments, **options)

        return note

    for name in ("render_chat", "tokenize", "decode_tokens"):
        monkeypatch.setattr(conversation, name, noted(getattr(conversation, name)))
    async with running_llm(llm) as engine:
        chat = AsyncChat(engine, SYSTEM, PARAMS)
        for question in QUESTIONS[:2]:
            await chat.send(question)
    assert threads == {"radixkv-tokenizer"}


async def leave(engine: AsyncLLM, chat: AsyncChat, steps: HeldSteps) -> None:
    async with aclosing(chat.stream("Why?", ENDLESS)) as pieces:
        async for piece in pieces:
            if piece:
                break


async def cancel(engine: AsyncLLM, chat: AsyncChat, steps: HeldSteps) -> None:
    turn = asyncio.create_task(chat.send("Why?", ENDLESS))
    await until(lambda: engine.stats.num_running)
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn


async def fail(engine: AsyncLLM, chat: AsyncChat, steps: HeldSteps) -> None:
    turn = asyncio.create_task(chat.send("Why?", ENDLESS))
    await until(lambda: engine.stats.num_running)
    engine.fail("request-0", StepFailedError("broken"))
    with pytest.raises(StepFailedError, match="broken"):
        await turn


async def abort(engine: AsyncLLM, chat: AsyncChat, steps: HeldSteps) -> None:
    turn = asyncio.create_task(chat.send("Why?", ENDLESS))
    await until(lambda: engine.stats.num_running)
    engine.abort("request-0")
    steps.allow_all()
    with pytest.raises(RuntimeError, match="the answer was aborted before its end"):
        await turn


async def refuse(engine: AsyncLLM, chat: AsyncChat, steps: HeldSteps) -> None:
    with pytest.raises(PromptTooLongError):
        await chat.send("Why? " * 3000)


@pytest.mark.parametrize("end", [leave, cancel, fail, abort, refuse])
async def test_a_turn_that_is_not_answered_to_its_end_does_not_join(
    default_tokenizer: Any, end: Callable[[AsyncLLM, AsyncChat, HeldSteps], Awaitable[None]]
) -> None:
    llm = tiny_llm(default_tokenizer)
    offline = Chat(llm, SYSTEM, PARAMS)
    expected = offline.send(QUESTIONS[0])
    async with running_llm(llm) as engine:
        chat = AsyncChat(engine, SYSTEM, PARAMS)
        steps = await engine.call(HeldSteps)
        steps.allow(50)
        await end(engine, chat, steps)
        steps.allow_all()
        assert [message["role"] for message in chat.history] == ["system"]
        assert (chat.answer, chat.last_output, chat.last_num_tokens) == (None, None, 0)
        await until(lambda: not engine.num_unfinished)
        assert await chat.send(QUESTIONS[0]) == expected
        assert chat.history == offline.history


async def test_a_turn_is_cancelled_while_it_is_tokenized(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_go_on = threading.Event(), threading.Event()
    render_chat = conversation.render_chat

    def held(*arguments: Any, **options: Any) -> Any:
        begun.set()
        assert may_go_on.wait(HANGING)
        return render_chat(*arguments, **options)

    monkeypatch.setattr(conversation, "render_chat", held)
    async with running_llm(llm) as engine:
        chat = AsyncChat(engine, SYSTEM, PARAMS)
        turn = asyncio.create_task(chat.send("Why?"))
        await until(begun.is_set)
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        may_go_on.set()
        await chat.send(QUESTIONS[0])
        assert [message["content"] for message in chat.history[:-1]] == [SYSTEM, QUESTIONS[0]]


async def test_a_turn_that_a_shutdown_aborts_does_not_join(default_tokenizer: Any) -> None:
    """Half an answer would otherwise be returned as if it were all of it."""
    async with asyncio.timeout(HANGING):
        async with AsyncLLM(tiny_llm(default_tokenizer)) as engine:
            chat = AsyncChat(engine, SYSTEM)
            steps = await engine.call(HeldSteps)
            steps.allow(3)
            turn = asyncio.create_task(chat.send("Why?", ENDLESS))
            await until(lambda: engine.stats.num_running)
            steps.allow_all()
        with pytest.raises(RuntimeError, match="the answer was aborted before its end"):
            await turn
        assert [message["role"] for message in chat.history] == ["system"]


async def test_of_two_turns_at_a_time_one_joins(llm: LLM) -> None:
    async with running_llm(llm) as engine:
        chat = AsyncChat(engine, SYSTEM, PARAMS)
        turns = await asyncio.gather(*(chat.send(question) for question in QUESTIONS[:2]), return_exceptions=True)
        (refused,) = [turn for turn in turns if not isinstance(turn, str)]
        assert isinstance(refused, RuntimeError)
        assert "another turn joined the conversation" in str(refused)
        assert len(chat.history) == 3
        assert chat.history[-1]["content"] in turns


@pytest.mark.parametrize("tools", [None, [ADD]], ids=["text", "calls"])
def test_a_turn_that_was_overtaken_before_it_began_computes_nothing(llm: LLM, tools: Any) -> None:
    """With calls, it would have come between them and their results."""
    chat = Chat(llm, SYSTEM, SamplingParams(seed=1, max_tokens=40), tools=tools)
    late = chat.stream("And a forest?")
    chat.send("What is a tree?", tool_choice="required" if tools else None)
    num_steps = llm.engine.num_steps
    with pytest.raises(RuntimeError, match="another turn joined the conversation"):
        next(late)
    assert llm.engine.num_steps == num_steps


async def test_turns_have_the_priority_and_the_tenant_of_their_conversation(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, str]] = []
    factory = llm.engine.request_factory
    make = factory.make

    def noted(*arguments: Any, **options: Any) -> Any:
        made.append((options["priority"], options["tenant"]))
        return make(*arguments, **options)

    monkeypatch.setattr(factory, "make", noted)
    async with running_llm(llm) as engine:
        chat = AsyncChat(engine, sampling_params=PARAMS, priority=5, tenant="ann")
        await chat.send("Hi")
        await chat.fork().send("Hi")
        await AsyncChat(engine, sampling_params=PARAMS, priority=None).send("Hi")
    assert made == [(5, "ann"), (5, "ann"), (0, "")]


async def test_what_is_changed_after_a_call_has_no_effect(llm: LLM) -> None:
    async with running_llm(llm) as engine:
        params = SamplingParams(seed=1, max_tokens=3)
        chat = AsyncChat(engine, SYSTEM)
        pieces = chat.stream("Hi", params)
        params.max_tokens, params.n = 9, 2
        assert [piece async for piece in pieces]
        assert chat.last_num_tokens == 3


async def test_impossible_arguments_are_named(llm: LLM) -> None:
    with pytest.raises(TypeError, match="llm: expected an AsyncLLM, got LLM"):
        AsyncChat(llm)  # type: ignore[arg-type]
    async with running_llm(llm) as engine:
        with pytest.raises(TypeError, match="llm: expected an LLM, got AsyncLLM"):
            Chat(engine)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="system: expected a string or None, got 5"):
            AsyncChat(engine, 5)  # type: ignore[arg-type]
        chat = AsyncChat(engine)
        with pytest.raises(TypeError, match="text: expected a string, got 5"):
            chat.stream(5)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="one answer per turn, got n=2"):
            chat.stream("Hi", SamplingParams(n=2))
        for options, name in (({"tenant": 5}, "tenant"), ({"priority": "high"}, "priority")):
            with pytest.raises(TypeError, match=f"{name}: expected"):
                AsyncChat(engine, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("results", [None, 7, ["7"], [{"role": "tool", "content": "7"}]])
def test_results_that_are_no_dictionary_are_refused(llm: LLM, results: Any) -> None:
    """A list of messages was answered by what Python says of unhashable types."""
    with pytest.raises(TypeError, match="results: expected a dictionary of texts by the calls' ids, got"):
        Chat(llm).send_results(results)


def test_a_history_is_a_copy(llm: LLM) -> None:
    """Of calls, it was not: what a program changed in them was said in the next turn."""
    chat = Chat(llm, sampling_params=SamplingParams(seed=1, max_tokens=60), tools=[ADD])
    chat.send("What is 3 plus 4?", tool_choice="required")
    chat.history[-1]["tool_calls"][0]["function"]["name"] = "other"
    assert chat.history[-1]["tool_calls"][0]["function"]["name"] == "add"
