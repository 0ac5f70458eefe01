"""Explaining, pinning, inspecting, recording and following a model's cache."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.cache_driver import press
from typer.testing import CliRunner

from radixkv.cache import Reason
from radixkv.cli.main import app

if TYPE_CHECKING:
    from radixkv.llm import LLM


def tiny_llm(**options: Any) -> LLM:
    from support.model_zoo import build_supported

    from radixkv.llm import LLM

    return LLM(build_supported("llama"), **{"block_size": 4, "num_blocks": 100, **options})


SYSTEM = "You are the assistant of a small public library. Answer in one sentence, and be polite. "


def answer(llm: LLM, prompt: object, **options: object) -> None:
    from radixkv import SamplingParams

    llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0), use_tqdm=False, **options)  # type: ignore[arg-type]


def test_an_explanation_shows_both_texts_where_prompts_differ(llm: LLM) -> None:
    answer(llm, SYSTEM + "Today is 2026-11-20. When do you open?")
    explanation = llm.explain(SYSTEM + "Today is 2026-11-21. When do you open?")
    assert (
        explanation.num_reused_tokens + sum(part.num_tokens for part in explanation.computed)
        == explanation.num_prompt_tokens
    )
    assert explanation.difference is not None
    assert explanation.difference.before.endswith("2026-11-2")
    assert (explanation.difference.prompt[0], explanation.difference.cached[0]) == ("1", "0")
    assert f"differs at token {explanation.difference.position}: `1|" in str(explanation)
    assert "put what changes after what stays" in str(explanation)
    assert json.loads(json.dumps(explanation.as_dict()))["num_reused_tokens"] == explanation.num_reused_tokens
    from radixkv import SamplingParams

    (output,) = llm.generate(SYSTEM + "Today is 2026-11-21. When do you open?", SamplingParams(max_tokens=1))
    assert output.num_cached_tokens == explanation.num_reused_tokens


def test_prompts_with_nothing_in_common_get_no_advice_about_their_order() -> None:
    """Nothing of them stays that could come first."""
    for earlier in ([], ["--after", "Hello there"]):
        result = CliRunner().invoke(app, ["explain", "abc def", "--after", "Hello", *earlier])
        assert result.output.endswith(
            "not seen before, as far as is remembered\nnothing cached that this prompt may share begins like it\n"
        )
    result = CliRunner().invoke(app, ["explain", "abc def", "--after", "abc xyz"])
    assert "put what changes after what stays" in result.output


def test_other_salts_and_disabled_reading_are_explained(llm: LLM) -> None:
    answer(llm, {"prompt": SYSTEM, "cache_salt": "theirs"})
    mine = llm.explain(SYSTEM, cache_salt="mine")
    assert [part.reason for part in mine.computed] == [Reason.OTHER_NAMESPACE]
    assert "under another cache salt" in str(mine)
    assert "theirs" not in str(mine) + json.dumps(mine.as_dict())
    off = llm.explain({"prompt": SYSTEM, "cache_salt": "theirs", "cache": {"read": False}})
    assert [part.reason for part in off.computed] == [Reason.READ_OFF]
    assert "does not read the cache" in str(off)
    assert "all is cached" in str(llm.explain({"prompt": SYSTEM, "cache_salt": "theirs"}))


def test_a_conversation_is_explained_as_it_would_be_answered(llm: LLM) -> None:
    from radixkv import SamplingParams

    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Hello."}]
    assert "not seen before" in str(llm.explain(messages))
    llm.chat(messages, SamplingParams(max_tokens=4), use_tqdm=False)
    explanation = llm.explain([*messages[:1], {"role": "user", "content": "Hello. Who are you?"}])
    assert explanation.difference is not None
    assert explanation.difference.before.endswith("Hello.")
    with pytest.raises(ValueError, match="prompt: expected one conversation, got 2"):
        llm.explain([messages, messages])


def test_a_pinned_prompt_survives_the_eviction_of_others() -> None:
    llm = tiny_llm(num_blocks=40)
    kept = list(range(20))
    pin = llm.pin({"prompt_token_ids": kept}, ttl=3600)
    assert (pin.num_tokens, llm.pins()) == (20, [pin])
    for number in range(4):
        answer(llm, {"prompt_token_ids": [30 + number] * 60})
    cache = llm.engine.cache
    assert cache.stats.evicted_blocks > 0
    assert cache.match(kept) == 20
    assert cache.explain([30] * 60).computed[0].reason is Reason.EVICTED
    llm.unpin(pin)
    assert llm.pins() == []
    cache.check()


def test_an_evicted_prompt_is_explained(llm: LLM) -> None:
    answer(llm, SYSTEM)
    press(llm.engine.cache, llm.engine.cache.num_blocks)
    explanation = llm.explain(SYSTEM)
    assert explanation.computed[0].reason is Reason.EVICTED
    assert "evicted 0 s ago, unused for 0 s; used once before" in str(explanation)


def test_what_is_cached_can_be_inspected(llm: LLM) -> None:
    for question in ("When do you open?", "Who are you?"):
        answer(llm, SYSTEM + question)
    snapshot = llm.inspect()
    assert snapshot.sharing_factor > 1
    assert snapshot.saved_bytes == (snapshot.num_unshared_blocks - snapshot.num_cached_blocks) * (
        llm.engine.pool.block_nbytes
    )
    assert any((node.text or "").startswith("You are the assistant") for node in snapshot.nodes)


def test_a_recorded_trace_can_be_replayed_and_holds_no_text(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    llm = tiny_llm(record_trace=path, eviction_policy="adaptive")
    for tail in ([1], [2]):
        answer(llm, {"prompt_token_ids": [*range(10, 30), *tail]})
    lines = path.read_text().splitlines()
    assert len(lines) == 3
    assert set(json.loads(lines[1])) == {"timestamp", "input_length", "output_length", "hash_ids", "output_hash_ids"}
    result = CliRunner().invoke(app, ["simulate", str(path), "--blocks", "4,20", "--policy", "lru"])
    assert result.exit_code == 0, result.output
    with pytest.raises(ValueError, match="eviction_policy: expected one of lru"):
        tiny_llm(eviction_policy="best")


def test_of_a_beam_search_the_best_beam_is_recorded(tmp_path: Path) -> None:
    """It was some beam that still ran, without its last token."""
    from radixkv import BeamSearchParams

    path = tmp_path / "trace.jsonl"
    llm = tiny_llm(record_trace=path)
    prompt = list(range(10, 22))
    (output,) = llm.beam_search([{"prompt_token_ids": prompt}], BeamSearchParams(beam_width=3, max_tokens=8))
    best = output.sequences[0].tokens
    answer(llm, {"prompt_token_ids": best})
    search, following = (json.loads(line) for line in path.read_text().splitlines()[1:])
    assert search["output_length"] == len(best) - len(prompt) == 8
    assert [*search["hash_ids"], *search["output_hash_ids"]] == following["hash_ids"]


def test_the_events_of_a_model_are_published(tmp_path: Path) -> None:
    import zmq
    from support.event_replay import replay_events

    replay_endpoint = f"ipc://{tmp_path}/replay"
    llm = tiny_llm(kv_events_endpoint=f"ipc://{tmp_path}/events", kv_events_replay_endpoint=replay_endpoint)
    answer(llm, {"prompt_token_ids": list(range(10, 30))})
    llm.reset_prefix_cache()
    with zmq.Context() as context:
        assert len(replay_events(context, replay_endpoint, 0)) >= 2
        context.destroy(linger=0)


def test_a_shut_down_model_leaves_its_address_and_goes_on_without_events() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    first = tiny_llm(kv_events_endpoint=endpoint)
    first.shutdown()
    second = tiny_llm(kv_events_endpoint=endpoint)
    for llm in (first, second):
        answer(llm, {"prompt_token_ids": list(range(10, 30))})
        assert llm.engine.cache.match(list(range(10, 30))) == 20


def test_the_command_explains_with_a_tokenizer_alone() -> None:
    result = CliRunner().invoke(app, ["explain", "Today is 2026-11-21. Hello", "--after", "Today is 2026-11-20. Hello"])
    assert result.exit_code == 0, result.output
    assert "against `0|.| Hello`" in result.output


@pytest.mark.parametrize(
    ("arguments", "name"), [(["", "--after", "x"], "prompt"), (["x", "--after", "y", "--after", ""], "after")]
)
def test_the_command_refuses_texts_without_tokens(arguments: list[str], name: str) -> None:
    """An empty earlier prompt was ignored, and the error for an empty prompt named an argument that the command lacks."""
    result = CliRunner().invoke(app, ["explain", *arguments])
    assert str(result.exception) == f"{name}: '' has no tokens; a prompt needs at least one"
