"""Replicas of new weights take the place of old ones: no request is lost, and no answer is made of both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.answers_to_continue import PROMPT, answer, begun_on
from support.held_steps import HeldSteps
from support.pretended_replicas import CAPACITY, IDENTITY, until
from support.pretended_replicas import Cluster as PretendedCluster
from support.pretended_replicas import llm_of as pretended_llm
from support.replica_servers import LocalReplica, drain, ingress_client, local_replicas, one_more, tiny_llm

from radixkv import AsyncLLM, __version__
from radixkv.cluster import MismatchError, ReplicaDescription, ReplicaSet, replica_set
from radixkv.cluster.attempt import Attempt, MovedError
from radixkv.cluster.generations import Generations
from radixkv.errors import ReplicasLostError


def described(started: float, **identity: Any) -> ReplicaDescription:
    return ReplicaDescription(str(started), started, {**IDENTITY, **identity}, CAPACITY, None)


class TestGenerations:
    def test_a_generation_is_as_old_as_its_first_replica(self) -> None:
        generations = Generations()
        assert generations.newest is None
        old, new, restarted = described(1), described(2, weights="new"), described(3)
        for name, description in {"a": old, "b": new, "c": restarted}.items():
            generations.add(name, description)
        assert generations.newest is new
        assert generations.by_replica["a"] == generations.by_replica["c"] != generations.by_replica["b"]
        generations.remove("b")
        assert generations.newest is old
        assert set(generations.by_replica) == {"a", "c"}

    def test_an_old_generation_under_new_names_is_not_the_newest(self) -> None:
        """Ray starts each replica under a new name."""
        generations = Generations()
        generations.add("one", described(0, weights="old"))
        generations.add("two", described(100, weights="new"))
        generations.remove("one")
        generations.add("three", described(200, weights="old"))
        assert generations.newest is not None
        assert generations.newest.identity["weights"] == "new"

    def test_clocks_of_hosts_do_not_say_which_one_is_the_newest(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Prompts were written for the old generation where the host of the new one was behind."""
        generations = Generations()
        for name, clock, started in (("old", 5000.0, 4000.0), ("new", 100.0, 90.0)):
            with monkeypatch.context() as patch:
                patch.setattr("time.monotonic", lambda clock=clock: clock)
                sent = described(started, weights=name).as_json()
            generations.add(name, ReplicaDescription.from_json(sent))
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
        assert not generations.by_replica

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


async def test_what_has_begun_must_not_be_called_away_as_if_it_had_not() -> None:
    """If a request is called away for having no token, and gets one just then, it can go on only where it is."""
    attempt = Attempt("a", "old", 100, begun=False)
    attempt.move({("new", 100)})
    attempt.begin()
    attempt.check()
    attempt.move({("new", 100)})
    attempt.check()
    attempt.move({("old", 100)})
    with pytest.raises(MovedError):
        attempt.check()


async def test_a_drained_replica_keeps_what_only_it_can_go_on_with(default_tokenizer: Any, tmp_path: Path) -> None:
    async with local_replicas(tmp_path, tiny_llm(default_tokenizer)) as (replicas, (old,)):
        expected = await answer(replicas)
        steps = await old.llm.call(HeldSteps)
        task = await begun_on(replicas, old, steps, "0")
        async with one_more(replicas, tiny_llm(default_tokenizer, seed=1), tmp_path / "new.sock", "new"):
            assert len(set(replicas.generations.by_replica.values())) == 2
            await drain(old)
            steps.allow_all()
            await until(lambda: replicas.available == ["new"])
            assert await answer(replicas) != expected
            assert await task == expected
            await replicas.remove("new")


async def test_within_a_generation_answers_move_at_once(default_tokenizer: Any, tmp_path: Path) -> None:
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


async def test_what_has_no_token_moves_to_any_generation(default_tokenizer: Any, tmp_path: Path) -> None:
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


@asynccontextmanager
async def lost_beside_a_newer(
    replicas: ReplicaSet, old: LocalReplica, tokenizer: Any, tmp_path: Path
) -> AsyncIterator[asyncio.Task[list[int]]]:
    """What answers a request that the only replica of its generation began, and was killed then; a newer one is up."""
    steps = await old.llm.call(HeldSteps)
    async with one_more(replicas, tiny_llm(tokenizer, seed=1), tmp_path / "new.sock", "new"):
        replicas.streams.router.expect("new", "another's", [], 100_000)
        task = await begun_on(replicas, old, steps, "0")
        await old.kill()
        steps.allow_all()
        yield task
        await replicas.remove("new")


async def test_what_a_lost_generation_has_begun_is_continued_by_none_other(
    default_tokenizer: Any, tmp_path: Path
) -> None:
    async with local_replicas(tmp_path, tiny_llm(default_tokenizer), wait_seconds=0) as (replicas, (old,)):
        expected = await answer(replicas)
        async with lost_beside_a_newer(replicas, old, default_tokenizer, tmp_path) as task:
            with pytest.raises(ReplicasLostError, match="there is no replica of the generation that began it"):
                await task
            assert await answer(replicas) != expected  # by the new one
        await old.start()


async def test_it_waits_for_its_generation_to_come_back(default_tokenizer: Any, tmp_path: Path) -> None:
    async with local_replicas(tmp_path, tiny_llm(default_tokenizer), wait_seconds=600) as (replicas, (old,)):
        expected = await answer(replicas)
        async with lost_beside_a_newer(replicas, old, default_tokenizer, tmp_path) as task:
            await until(lambda: "0" not in replicas.available)
            await old.start()
            assert await task == expected


async def test_an_update_under_load_loses_no_request_and_mixes_no_answer(
    default_tokenizer: Any, tmp_path: Path
) -> None:
    body = {"prompt": PROMPT.token_ids, "seed": 5, "max_tokens": 30, "ignore_eos": True, "return_token_ids": True}
    old = [tiny_llm(default_tokenizer) for _ in range(2)]
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


async def test_defaults_and_length_follow_the_new_generation_and_administrators_see_it() -> None:
    cluster = PretendedCluster()
    cluster.identities["http://new"] = {
        "weights": "new",
        "sampling_defaults": {"top_k": 5},
        "eos_token_ids": [7],
        "model_length": 60,
    }
    cluster.capacities["http://new"] = {"max_model_len": 60}
    replicas = await cluster.up("old")
    llm = pretended_llm(replicas)
    assert (llm.loaded.max_model_len, llm.loaded.sampling_defaults) == (100, {})
    await replicas.add("new", "http://new")
    assert llm.loaded.max_model_len == 60
    await replicas.remove("old")
    assert (llm.loaded.sampling_defaults, llm.loaded.eos_token_ids) == ({"top_k": 5}, frozenset({7}))
    assert llm.loaded is llm.loaded
    await replicas.close()


async def test_a_replica_of_the_old_generation_that_is_started_again_does_not_make_it_the_newest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When the last old replica crashed during an update, template, defaults and end tokens were the old ones again."""
    monkeypatch.setattr(replica_set, "_SECONDS_BETWEEN_ATTEMPTS", 0.0)
    cluster, started = PretendedCluster(), {"old": 1.0, "new": 2.0}

    async def describe(request: httpx.Request) -> httpx.Response:
        name = request.url.host
        each = described(started[name], weights=name)
        return httpx.Response(200, json=each.as_json())

    cluster.answers["/description"] = describe
    replicas = await cluster.up(*started)
    generations = replicas.generations
    before, num_changes = generations.newest, generations.num_changes
    started["old"] = 3.0
    cluster.hung.add("http://old")
    await until(lambda: generations.num_changes > num_changes)
    cluster.hung.clear()
    await until(lambda: set(replicas.available) == {"old", "new"})
    assert {each.instance for each in generations._last.values()} == {"3.0", "2.0"}
    assert generations.newest is before
    await replicas.close()
