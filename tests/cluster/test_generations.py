"""Replicas of new weights take the place of old ones: no request is lost, and no answer is made of both."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.held_steps import HeldSteps
from support.pretended_replicas import CAPACITY, IDENTITY, until
from support.pretended_replicas import Cluster as PretendedCluster
from support.pretended_replicas import llm_of as pretended_llm
from support.replica_servers import LocalReplica, ingress_client, local_replicas, tiny_llm, tiny_model
from tokenizers import normalizers

from radixkv import LLM, AsyncLLM, BeamSearchParams, SamplingParams, __version__
from radixkv.cluster import ClusterLLM, MismatchError, ReplicaDescription, ReplicaSet, replica_set, text_interface
from radixkv.cluster.attempt import MovedError, Ticket
from radixkv.cluster.generations import Generations
from radixkv.config import ModelConfig
from radixkv.errors import ModelLoadError, PromptTooLongError, ReplicasLostError, RequestTooLargeError
from radixkv.model.text_interface import TextInterface
from radixkv.model.tokenizer import tokenizer_digest
from radixkv.outputs import CompletionOutput
from radixkv.prompts import Prompt

PROMPT = Prompt(list(range(100, 200)))
SAMPLED = SamplingParams(seed=5, max_tokens=60, ignore_eos=True)


async def answer(replicas: ReplicaSet, params: SamplingParams = SAMPLED) -> list[int]:
    return [
        token_id
        async for delta in replicas.streams.generate(PROMPT, params, "one")
        for token_id in delta.outputs[0].token_ids
    ]


def described(started: float, **identity: Any) -> ReplicaDescription:
    return ReplicaDescription(str(started), started, {**IDENTITY, **identity}, CAPACITY, None)


async def drain(replica: LocalReplica) -> None:
    replica.llm.start_draining()


@asynccontextmanager
async def one_more(replicas: ReplicaSet, llm: Any, path: Path, name: str) -> AsyncIterator[LocalReplica]:
    replica = LocalReplica(AsyncLLM(llm), path)
    await replica.start()
    try:
        await replicas.add(name, replica.url)
        yield replica
    finally:
        await replica.kill()
        await replica.llm.shutdown()


async def begun_on(replicas: ReplicaSet, server: LocalReplica, steps: HeldSteps, name: str) -> asyncio.Task[list[int]]:
    """An answer that has tokens of this replica, and gets no more until its steps are allowed."""
    task = asyncio.ensure_future(answer(replicas))
    steps.allow(8)
    await until(lambda: server.llm.stats.num_decoding and replicas.streams.num_streams(name))
    ticket = next(iter(replicas.streams._tickets[replicas._clients[name]]))
    await until(lambda: ticket._begun)
    return task


class TestGenerations:
    def test_a_generation_is_as_old_as_its_first_replica(self) -> None:
        generations = Generations()
        assert generations.newest is None
        old, new, restarted = described(1), described(2, weights="new"), described(3)
        for name, description in {"a": old, "b": new, "c": restarted}.items():
            generations.add(name, description)
        assert generations.newest is new
        assert generations.names["a"] == generations.names["c"] != generations.names["b"]
        generations.remove("b")
        assert generations.newest is old
        assert set(generations.names) == {"a", "c"}

    def test_an_old_generation_under_new_names_is_not_the_newest(self) -> None:
        """Ray starts each replica under a new name."""
        generations = Generations()
        generations.add("one", described(0, weights="old"))
        generations.add("two", described(100, weights="new"))
        generations.remove("one")
        generations.add("three", described(200, weights="old"))
        assert generations.newest is not None
        assert generations.newest.identity["weights"] == "new"

    def test_where_none_is_up_the_last_ones_count(self) -> None:
        generations = Generations()
        generations.add("a", described(1))
        generations.add("b", replace(described(2), capacity={**CAPACITY, "max_model_len": 50}))
        assert (generations.max_model_len, len(generations.capacities)) == (50, 2)
        generations.remove("b")
        generations.remove("a")
        generations.remove("a")
        assert generations.max_model_len == 100
        assert generations.newest is not None
        assert not generations.names

    @pytest.mark.parametrize(("name", "value"), [("tokenizer", "x"), ("vocab_size", 51), ("block_size", 8)])
    def test_other_prompts_are_refused_even_when_none_is_up(self, name: str, value: Any) -> None:
        generations = Generations()
        generations.check("any", described(1, **{name: value}))
        generations.add("a", described(1))
        generations.remove("a")
        with pytest.raises(MismatchError, match=f"^it cannot answer what the first replica does, of tiny: {name}: "):
            generations.check("it", described(2, **{name: value}))
        generations.check("it", described(2, weights="new", model="new", dtype="bfloat16", chat_template="new"))

    def test_another_version_than_the_ingress_s_is_refused(self) -> None:
        """Tests of one version say nothing about what an ingress and replicas of two versions answer together."""
        with pytest.raises(
            MismatchError, match=rf"^it runs RadixKV 0\.0\.1; .* this ingress's version, {__version__}$"
        ):
            Generations().check("it", described(1, version="0.0.1"))

    def test_each_generation_is_announced_once(self, caplog: pytest.LogCaptureFixture) -> None:
        generations = Generations()
        for name, weights in [("a", "old"), ("b", "old"), ("c", "new"), ("d", "new"), ("e", "old")]:
            generations.add(name, described(1, weights=weights))
        (record,) = caplog.records
        assert "replica 'c' is of another generation" in record.getMessage()
        assert record.getMessage().endswith("weights: 'old', and 'new' there")


def test_what_has_begun_must_not_be_called_away_as_if_it_had_not() -> None:
    """If a request is called away for having no token, and gets one just then, it can go on only where it is."""

    async def main() -> None:
        ticket = Ticket("a", "old", 100, begun=False)
        ticket.move({("new", 100)})
        ticket.begin()
        ticket.check()
        ticket.move({("new", 100)})
        ticket.check()
        ticket.move({("old", 100)})
        with pytest.raises(MovedError):
            ticket.check()

    asyncio.run(main())


def test_a_drained_replica_keeps_what_only_it_can_go_on_with(default_tokenizer: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with local_replicas(tmp_path, tiny_llm(default_tokenizer)) as (replicas, (old,)):
            expected = await answer(replicas)
            steps = await old.llm.call(HeldSteps)
            task = await begun_on(replicas, old, steps, "0")
            async with one_more(replicas, tiny_llm(default_tokenizer, seed=1), tmp_path / "new.sock", "new"):
                assert len(set(replicas.generations.names.values())) == 2
                await drain(old)
                steps.allow_all()
                await until(lambda: replicas.available == ["new"])
                assert await answer(replicas) != expected
                assert await task == expected
                await replicas.remove("new")

    asyncio.run(main())


def test_within_a_generation_answers_move_at_once(default_tokenizer: Any, tmp_path: Path) -> None:
    async def main() -> None:
        llms = [tiny_llm(default_tokenizer), tiny_llm(default_tokenizer)]
        async with local_replicas(tmp_path, *llms) as (replicas, servers):
            expected = await answer(replicas)
            here = next(name for name in "01" if servers[int(name)].llm.stats.num_evictable_blocks)
            steps, steps_there = [await servers[i].llm.call(HeldSteps) for i in (int(here), 1 - int(here))]
            async with one_more(replicas, tiny_llm(default_tokenizer, seed=1), tmp_path / "new.sock", "new"):
                task = await begun_on(replicas, servers[int(here)], steps, here)
                await replicas.remove(here)
                assert not task.done()
                steps_there.allow_all()
                assert await task == expected
                steps.allow_all()
                await replicas.remove("new")

    asyncio.run(main())


def test_what_has_no_token_moves_to_any_generation(default_tokenizer: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with local_replicas(tmp_path, tiny_llm(default_tokenizer)) as (replicas, (old,)):
            await answer(replicas)
            steps = await old.llm.call(HeldSteps)
            async with one_more(replicas, tiny_llm(default_tokenizer, seed=1), tmp_path / "new.sock", "new"):
                task = asyncio.ensure_future(answer(replicas))
                await until(lambda: replicas.streams.num_streams("0") and steps.is_holding)
                await replicas.remove("0")
                assert await task == await answer(replicas)
                steps.allow_all()
                await replicas.remove("new")

    asyncio.run(main())


def test_what_a_lost_generation_has_begun_is_continued_by_none_other(default_tokenizer: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with local_replicas(tmp_path, tiny_llm(default_tokenizer), wait_seconds=0) as (replicas, (old,)):
            expected = await answer(replicas)
            steps = await old.llm.call(HeldSteps)
            async with one_more(replicas, tiny_llm(default_tokenizer, seed=1), tmp_path / "new.sock", "new"):
                replicas._router.expect("new", "another's", [], 100_000)  # type: ignore[union-attr]
                task = await begun_on(replicas, old, steps, "0")
                await old.kill()
                steps.allow_all()
                with pytest.raises(ReplicasLostError, match="there is no replica of the generation that began it"):
                    await task
                assert await answer(replicas) != expected  # by the new one
                await replicas.remove("new")
            await old.start()

    asyncio.run(main())


def test_it_waits_for_its_generation_to_come_back(default_tokenizer: Any, tmp_path: Path) -> None:
    async def main() -> None:
        async with local_replicas(tmp_path, tiny_llm(default_tokenizer), wait_seconds=600) as (replicas, (old,)):
            expected = await answer(replicas)
            steps = await old.llm.call(HeldSteps)
            async with one_more(replicas, tiny_llm(default_tokenizer, seed=1), tmp_path / "new.sock", "new"):
                replicas._router.expect("new", "another's", [], 100_000)  # type: ignore[union-attr]
                task = await begun_on(replicas, old, steps, "0")
                await old.kill()
                steps.allow_all()
                await until(lambda: "0" not in replicas.available)
                await old.start()
                assert await task == expected
                await replicas.remove("new")

    asyncio.run(main())


def test_an_update_under_load_loses_no_request_and_mixes_no_answer(default_tokenizer: Any, tmp_path: Path) -> None:
    body = {"prompt": PROMPT.token_ids, "seed": 5, "max_tokens": 30, "ignore_eos": True, "return_token_ids": True}
    old = [tiny_llm(default_tokenizer) for _ in range(2)]

    async def main() -> None:
        async with (
            local_replicas(tmp_path, *old) as (replicas, servers),
            ingress_client(replicas, default_tokenizer) as client,
        ):
            answers: list[tuple[int, ...]] = []
            updated = False

            async def ask() -> tuple[int, ...]:
                response = await client.post("/v1/completions", json=body)
                assert response.status_code == 200, response.text
                return tuple(response.json()["choices"][0]["token_ids"])

            async def keep_asking() -> None:
                while not updated:
                    answers.append(await ask())

            before = await ask()
            load = [asyncio.ensure_future(keep_asking()) for _ in range(6)]
            news = []
            for number, server in enumerate(servers):
                new = LocalReplica(AsyncLLM(tiny_llm(default_tokenizer, seed=1)), tmp_path / f"new{number}.sock")
                await new.start()
                news.append(new)
                await replicas.add(f"new{number}", new.url)
                count = len(answers)
                await until(lambda count=count: len(answers) > count + 12)
                await drain(server)
                await replicas.remove(str(number))
                assert await server.llm.shutdown(grace_seconds=600)
            updated = True
            await asyncio.gather(*load)
            after = await ask()
            assert before != after
            assert set(answers) == {before, after}
            for new in news:
                await replicas.remove(replicas.names[0])
                await new.kill()
                await new.llm.shutdown()

    asyncio.run(main())


def test_defaults_and_length_follow_the_new_generation_and_administrators_see_it() -> None:
    async def main() -> None:
        cluster = PretendedCluster()
        cluster.identities["http://new"] = {
            "weights": "new",
            "sampling_defaults": {"top_k": 5},
            "eos_token_ids": [7],
            "model_length": 60,
        }
        cluster.capacities["http://new"] = {"max_model_len": 60}
        replicas = cluster.replicas()
        await replicas.add("old", "http://old")
        llm = pretended_llm(replicas)
        assert (llm.loaded.max_model_len, llm.loaded.sampling_defaults) == (100, {})
        await replicas.add("new", "http://new")
        assert llm.loaded.max_model_len == 60
        await replicas.remove("old")
        assert (llm.loaded.sampling_defaults, llm.loaded.eos_token_ids) == ({"top_k": 5}, frozenset({7}))
        assert llm.loaded is llm.loaded
        await replicas.close()

    asyncio.run(main())


def test_a_replica_of_the_old_generation_that_is_started_again_does_not_make_it_the_newest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When the last old replica crashed during an update, template, defaults and end tokens were the old ones again."""
    monkeypatch.setattr(replica_set, "_SECONDS_BETWEEN_ATTEMPTS", 0.0)

    async def main() -> None:
        cluster, started = PretendedCluster(), {"old": 1.0, "new": 2.0}

        async def describe(request: httpx.Request) -> httpx.Response:
            name = request.url.host
            each = described(started[name], weights=name)
            return httpx.Response(200, json=each.as_json())

        cluster.answers["/description"] = describe
        replicas = cluster.replicas()
        for name in started:
            await replicas.add(name, f"http://{name}")
        generations = replicas.generations
        before, num_changes = generations.newest, generations.num_changes
        started["old"] = 3.0
        cluster.hung.add("http://old")
        await until(lambda: generations.num_changes > num_changes)
        cluster.hung.clear()
        await until(lambda: set(replicas.available) == {"old", "new"})
        assert {each.instance for each in generations._up.values()} == {"3.0", "2.0"}
        assert generations.newest is before
        await replicas.close()

    asyncio.run(main())


def test_a_smaller_pool_is_of_the_same_generation_and_shortens_what_is_asked_for() -> None:
    async def main() -> None:
        cluster = PretendedCluster()
        cluster.capacities["http://small"] = {"max_model_len": 60}
        replicas = cluster.replicas()
        await replicas.add("large", "http://large")
        llm = pretended_llm(replicas)
        long = SamplingParams(max_tokens=1000)
        assert llm._bounded(long, Prompt([1] * 70)).max_tokens == 30
        await replicas.add("small", "http://small")
        assert len(set(replicas.generations.names.values())) == 1
        assert llm.loaded.max_model_len == 60
        for params in (long, SamplingParams(max_tokens=None), BeamSearchParams(2, 61), BeamSearchParams(2, None)):
            assert llm._bounded(params, Prompt([1])).max_tokens == 59
        assert llm._bounded(SAMPLED, Prompt([1] * 59)).max_tokens == 1
        at_least = SamplingParams(max_tokens=90, min_tokens=70)  # which one server answers as far as there is room, too
        assert llm._bounded(at_least, Prompt([1] * 10)).min_tokens == 50
        with pytest.raises(PromptTooLongError, match="60 tokens; a sequence has at most 60"):
            await llm.submit([Prompt([1] * 60)], SAMPLED)
        assert llm.num_unfinished == 0
        await replicas.close()

    asyncio.run(main())


def test_an_answer_goes_on_only_where_it_ends_as_it_would_have(tmp_path: Path, default_tokenizer: Any) -> None:
    async def main() -> None:
        small = tiny_llm(default_tokenizer, num_blocks=8)
        async with local_replicas(tmp_path, small) as (replicas, _):
            begun = Prompt([5, 6], resume=[CompletionOutput(0, "", [7, 8])])
            fits = SamplingParams(temperature=0, max_tokens=127, ignore_eos=True)
            ended = [delta async for delta in replicas.streams.generate(begun, fits, "one")]
            assert ended[-1].outputs[0].finish_reason == "length"
            with pytest.raises(
                RequestTooLargeError, match="may reach 130 tokens with its prompt, and there is room for 129"
            ):
                async for _ in replicas.streams.generate(begun, replace(fits, max_tokens=128), "two"):
                    pass

    asyncio.run(main())


def tiny_cluster(tokenizer: Any, replicas: ReplicaSet) -> ClusterLLM:
    return ClusterLLM(TextInterface(tokenizer, "tiny", 640, len(tokenizer), frozenset(), None, {}), replicas)


def test_what_waits_on_a_replica_that_dies_is_not_shortened_by_a_smaller_one(
    tmp_path: Path, default_tokenizer: Any
) -> None:
    """It was accepted at the larger one's length, and has no token yet; the smaller one joined later."""

    async def main() -> None:
        large, small = tiny_llm(default_tokenizer, num_blocks=40), tiny_llm(default_tokenizer, num_blocks=8)
        async with local_replicas(tmp_path, large, wait_seconds=600) as (replicas, (server,)):
            expected = await answer(replicas, long := replace(SAMPLED, max_tokens=60))
            llm = tiny_cluster(default_tokenizer, replicas)
            steps = await server.llm.call(HeldSteps)
            (stream,) = await llm.submit([PROMPT], long)
            async with one_more(replicas, small, tmp_path / "small.sock", "small"):
                assert llm.loaded.max_model_len == 129
                await server.kill()
                steps.allow_all()
                await until(lambda: "0" not in replicas.available)
                await server.start()
                assert [token_id async for delta in stream for token_id in delta.outputs[0].token_ids] == expected
                assert await llm.shutdown()
                await replicas.remove("small")

    asyncio.run(main())


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_drained_replica_finishes_what_fits_into_no_other_one(
    tmp_path: Path, default_tokenizer: Any, has_begun: bool
) -> None:
    async def main() -> None:
        large, small = tiny_llm(default_tokenizer, num_blocks=40), tiny_llm(default_tokenizer, num_blocks=8)
        async with local_replicas(tmp_path, large, wait_seconds=0) as (replicas, (server,)):
            expected = await answer(replicas)
            steps = await server.llm.call(HeldSteps)
            if has_begun:
                task = await begun_on(replicas, server, steps, "0")
            else:
                task = asyncio.ensure_future(answer(replicas))
                await until(lambda: replicas.streams.num_streams("0") and steps.is_holding)
            async with one_more(replicas, small, tmp_path / "small.sock", "small"):
                await drain(server)
                await until(lambda: replicas.available == ["small"])
                steps.allow_all()
                assert await task == expected
                await replicas.remove("small")

    asyncio.run(main())


def test_what_no_replica_has_taken_is_as_long_as_fits_on_the_one_that_comes(
    tmp_path: Path, default_tokenizer: Any
) -> None:
    async def main() -> None:
        large, small = tiny_llm(default_tokenizer, num_blocks=40), tiny_llm(default_tokenizer, num_blocks=8)
        async with local_replicas(tmp_path, large, wait_seconds=600) as (replicas, (server,)):
            llm = tiny_cluster(default_tokenizer, replicas)
            await server.kill()
            await until(lambda: not replicas.available)
            asked = asyncio.ensure_future(llm.submit([PROMPT], replace(SAMPLED, max_tokens=None)))
            await until(lambda: llm.num_unfinished)
            async with one_more(replicas, small, tmp_path / "small.sock", "small"):
                (stream,) = await asked
                assert len([token_id async for delta in stream for token_id in delta.outputs[0].token_ids]) == 29
                with pytest.raises(RequestTooLargeError, match="may reach 200 tokens"):
                    await answer(replicas, replace(SAMPLED, max_tokens=100))
                assert await llm.shutdown()
                await replicas.remove("small")
            await server.start()

    asyncio.run(main())


def test_conversations_are_written_by_the_chat_template_of_the_new_generation(
    tmp_path: Path, default_tokenizer: Any
) -> None:
    template = "{% for message in messages %}<{{ message.role }}> {{ message.content }} <tool_call>{% endfor %}"
    other_tokenizer = copy.copy(default_tokenizer)
    other_tokenizer.chat_template = template
    conversation = {"messages": [{"role": "user", "content": "the sea"}]}
    body = {**conversation, "temperature": 0, "max_tokens": 20, "ignore_eos": True}

    async def main() -> None:
        async with (
            local_replicas(tmp_path, tiny_llm(default_tokenizer)) as (replicas, (old,)),
            ingress_client(replicas, default_tokenizer) as client,
            ingress_client(replicas, default_tokenizer, chat_template=default_tokenizer.chat_template) as own,
        ):

            async def prompt(client: httpx.AsyncClient) -> str:
                response = await client.post("/tokenize", json=conversation)
                return str(default_tokenizer.decode(response.json()["tokens"]))

            async def answer() -> Any:
                response = await client.post("/v1/chat/completions", json=body)
                assert response.status_code == 200, response.text
                return response.json()["choices"]

            before, expected = await prompt(client), await answer()
            assert "<|im_start|>user\nthe sea" in before
            steps = await old.llm.call(HeldSteps)
            begun = asyncio.ensure_future(answer())
            steps.allow(5)
            await until(lambda: old.llm.stats.num_decoding)
            new = tiny_llm(other_tokenizer, seed=1)
            async with one_more(replicas, new, tmp_path / "new.sock", "new"):
                assert await prompt(client) == "<user> the sea <tool_call>"
                assert await prompt(own) == before
                info = await client.get("/tokenizer_info")
                assert info.json()["chat_template"] == template
                async with ingress_client(replicas, default_tokenizer) as later:
                    assert await prompt(later) == await prompt(client)
                steps.allow_all()
                assert await begun == expected
                await replicas.remove("new")
            assert await prompt(client) == before

    asyncio.run(main())


def test_an_ingress_writes_conversations_as_its_replicas_do_unless_it_is_told_how(
    tmp_path: Path, default_tokenizer: Any
) -> None:
    """One that was started after an update, or before replicas with a template of their own, used the model's: conversations
    were written in two ways, and found nothing cached by the other.
    """
    template = "{% for message in messages %}<{{ message.role }}> {{ message.content }}{% endfor %}"

    async def main() -> None:
        async with local_replicas(tmp_path, tiny_llm(default_tokenizer, chat_template=template)) as (replicas, _):
            for given, expected in ((None, template), ("{{ messages }}", "{{ messages }}")):
                config = ModelConfig(tokenizer=default_tokenizer, chat_template=given)
                loaded = text_interface(replicas, config=config)
                assert loaded.tokenizer.chat_template == expected
                llm = ClusterLLM(loaded, replicas, model_config=config)
                assert llm.loaded.tokenizer.chat_template == expected

    asyncio.run(main())


def test_another_tokenizer_than_the_replicas_is_refused(tmp_path: Path, default_tokenizer: Any) -> None:
    """An ingress with another version of the model's files sent wrong tokens, and answered."""
    other = copy.deepcopy(default_tokenizer)
    other.backend_tokenizer.normalizer = normalizers.Lowercase()

    async def main() -> None:
        async with local_replicas(tmp_path, tiny_llm(default_tokenizer)) as (replicas, _):
            with pytest.raises(
                ModelLoadError, match=r"^tokenizer: .*: expected the tokenizer of the replicas' LlamaFor"
            ):
                text_interface(replicas, config=ModelConfig(tokenizer=other))
            other.save_pretrained(tmp_path / "other")
            with pytest.raises(
                ModelLoadError, match=rf"^model: {tmp_path}/other: expected the tokenizer of the replicas' "
            ):
                text_interface(replicas, tmp_path / "other")

    asyncio.run(main())


def test_replicas_without_a_tokenizer_take_any(tmp_path: Path, default_tokenizer: Any) -> None:
    async def main() -> None:
        async with local_replicas(tmp_path, LLM(tiny_model(50), num_blocks=20, block_size=16)) as (replicas, _):
            loaded = text_interface(replicas, config=ModelConfig(tokenizer=default_tokenizer))
            assert loaded.tokenizer.chat_template == default_tokenizer.chat_template

    asyncio.run(main())


def test_tokenizers_are_told_apart_by_what_they_do(default_tokenizer: Any) -> None:
    class Slow:
        def get_vocab(self) -> dict[str, int]:
            return {"b": 1, "a": 0}

    digest = tokenizer_digest(default_tokenizer)
    default_tokenizer("sea", truncation=True, max_length=1, padding="max_length")
    assert tokenizer_digest(default_tokenizer) == digest
    assert len({digest, tokenizer_digest(None), tokenizer_digest(Slow())}) == 3
