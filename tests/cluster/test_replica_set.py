"""Replicas come, go, die and return; what the router knows of them is what they hold."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.held_steps import HeldSteps
from support.pretended_replicas import (
    GREEDY,
    LOAD,
    Cluster,
    answering,
    line,
    load_record,
    streaming,
    tokens,
    until,
)
from support.replica_servers import SECRET, LocalReplica, local_replicas, tiny_llm
from support.time_limit import HANGING

from radixkv import AsyncLLM, SamplingParams
from radixkv.cluster import MismatchError, ReplicaSet, ReplicaStreams
from radixkv.cluster.records import Kind, encode_hashes, encode_load, encode_record
from radixkv.errors import QueueFullError, ReplicasLostError
from radixkv.prompts import Prompt
from radixkv.routing import Router, prompt_hashes

PROMPT = list(range(100, 200))


@pytest.mark.parametrize("seconds", [None, -1.0])
def test_an_impossible_wait_is_refused(seconds: Any) -> None:
    with pytest.raises(ValueError, match=rf"^wait_seconds: expected a number of at least 0, got {seconds!r}$"):
        ReplicaSet(SECRET, wait_seconds=seconds)


@pytest.mark.parametrize(
    ("secret", "expected"),
    [
        ("too short", "at least 16 printable ASCII characters"),
        ("a secret, and more\r\n", "at least 16 printable ASCII characters"),
        ("a secret of the réplicas", "at least 16 printable ASCII characters"),
        ("a secret that a header cuts ", "no space at its end"),
        (b"a secret of the replicas", "a string, got a value of type bytes"),
        (None, "a string, got a value of type NoneType"),
    ],
)
def test_an_impossible_secret_is_refused_at_once_and_not_shown(secret: Any, expected: str) -> None:
    """A replica set used to try for ever to send it."""
    for make in (ReplicaSet, lambda secret: ReplicaStreams(Router(16), {}, secret)):
        with pytest.raises((TypeError, ValueError), match=rf"^secret: expected {expected}$"):
            make(secret)


async def test_the_router_has_what_each_replica_holds(default_tokenizer: Any, tmp_path: Path) -> None:
    warm = tiny_llm(default_tokenizer)
    warm.generate({"prompt_token_ids": PROMPT}, SamplingParams(max_tokens=1), use_tqdm=False)
    async with local_replicas(tmp_path, warm, tiny_llm(default_tokenizer)) as (replicas, _):
        router = replicas.streams.router
        hashes = prompt_hashes(PROMPT, "", 16)

        def holders() -> dict[int, int]:
            return dict(router._held.hits(hashes))

        assert holders() == {0b01: len(hashes)}  # from the snapshot
        (stream,) = [replicas.streams.generate(Prompt([*PROMPT, 7]), SamplingParams(max_tokens=4), "one")]
        cached = [delta.num_cached_tokens async for delta in stream]
        assert cached[-1] == len(PROMPT)
        await replicas.ask_all("POST", "/clear", b'{"name": null, "derived": true}')
        await until(lambda: not holders())


async def test_a_replica_that_reads_prompts_otherwise_is_refused_by_both_names(
    default_tokenizer: Any, tmp_path: Path
) -> None:
    async with local_replicas(tmp_path, tiny_llm(default_tokenizer)) as (replicas, _):
        other = LocalReplica(AsyncLLM(tiny_llm(default_tokenizer, block_size=32)), tmp_path / "other.sock")
        await other.start()
        refusal = "replica 'other' at unix:.*LlamaForCausalLM: block_size: 16, and 32 there"
        with pytest.raises(MismatchError, match=refusal):
            await replicas.add("other", other.url)
        await other.kill()
        await other.llm.shutdown()
        with pytest.raises(ConnectionError, match="replica 'nobody'"):
            await replicas.add("nobody", f"unix://{tmp_path}/nobody.sock")
        with pytest.raises(ValueError, match="url: expected http://host:port or unix:///path, got 'nothing'"):
            await replicas.add("wrong", "nothing")
        wrong_secret = ReplicaSet(SECRET + " not")
        with pytest.raises(ConnectionError, match="401"):
            await wrong_secret.add("0", f"unix://{tmp_path}/0.sock")
        assert replicas.names == replicas.available == ["0"]


async def test_streams_outlive_their_replica_and_it_may_return(default_tokenizer: Any, tmp_path: Path) -> None:
    params = SamplingParams(seed=5, max_tokens=200, ignore_eos=True)
    llms = [tiny_llm(default_tokenizer) for _ in range(2)]
    async with local_replicas(tmp_path, *llms) as (replicas, servers):
        expected = await tokens(replicas.streams, Prompt(PROMPT), params)
        for _ in range(2):
            task = asyncio.ensure_future(tokens(replicas.streams, Prompt(PROMPT), params))
            await until(lambda: any(replicas.streams.num_streams(name) for name in "01"))
            victim = next(name for name in "01" if replicas.streams.num_streams(name))
            await servers[int(victim)].kill()
            assert await task == expected
            await until(lambda victim=victim: victim not in replicas.available)
            assert replicas.names == ["0", "1"]
            await servers[int(victim)].start()
            await until(lambda victim=victim: victim in replicas.available)


async def test_a_stream_does_not_go_on_with_another_process_at_the_address_of_its_replica(
    default_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Until the ingress knew of it, its answers went on with the other weights of a process that had taken over."""
    monkeypatch.setattr("radixkv.cluster.replica_set._SECONDS_BETWEEN_ATTEMPTS", HANGING)
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    async with local_replicas(tmp_path, tiny_llm(default_tokenizer), wait_seconds=0.0) as (replicas, (old,)):
        steps = await old.llm.call(HeldSteps)
        stream = replicas.streams.generate(Prompt(PROMPT), params, "one")
        steps.allow(5)
        assert [part.token_ids for part in (await anext(stream)).outputs]
        await old.kill()
        steps.allow_all()
        successor = LocalReplica(AsyncLLM(tiny_llm(default_tokenizer, seed=1)), tmp_path / "0.sock")
        await successor.start()
        with pytest.raises(ReplicasLostError, match="no replica of the generation that began it that takes it"):
            async for _ in stream:
                pass
        pins = await replicas.ask("0", "GET", "/pins")
        assert pins is not None
        assert pins.status_code == 421
        assert successor.llm.stats.num_steps == 0
        await successor.kill()
        await successor.llm.shutdown()


async def test_removing_a_replica_moves_its_streams_at_once(default_tokenizer: Any, tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    llms = [tiny_llm(default_tokenizer) for _ in range(2)]
    async with local_replicas(tmp_path, *llms) as (replicas, servers):
        expected = await tokens(replicas.streams, Prompt(PROMPT), params)
        steps = [await server.llm.call(HeldSteps) for server in servers]
        task = asyncio.ensure_future(tokens(replicas.streams, Prompt(PROMPT), params))
        for each in steps:
            each.allow(5)
        await until(lambda: any(server.llm.stats.num_decoding for server in servers))
        here = next(name for name in "01" if replicas.streams.num_streams(name))
        await replicas.remove(here)
        assert not task.done()
        assert replicas.streams.num_streams(here) == 0
        for each in steps:
            each.allow_all()
        await until(lambda: not servers[int(here)].llm.num_unfinished)
        assert await task == expected


@pytest.mark.parametrize("is_killed", [True, False])
async def test_what_was_accepted_is_queued_by_a_replica_that_is_full(
    is_killed: bool, default_tokenizer: Any, tmp_path: Path
) -> None:
    """A full replica used to be asked for room until the time to wait for a replica was over; then the request was lost."""
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    prompts = [Prompt([*PROMPT[:40], last]) for last in range(4)]
    llms = [tiny_llm(default_tokenizer, max_num_seqs=1) for _ in range(2)]
    async with local_replicas(tmp_path, *llms) as (replicas, servers):
        expected = [await tokens(replicas.streams, prompt, params) for prompt in prompts]
        steps = [await server.llm.call(HeldSteps) for server in servers]
        for server in servers:
            server.llm._intake._max_queue = 1  # beside the one that runs

        def num_unfinished() -> list[int]:
            """The number after another step of each: between steps, an engine takes what was sent."""
            for each in steps:
                each.allow(1)
            return [server.llm.num_unfinished for server in servers]

        # As far as the sender has confirmations: what was not confirmed may be refused elsewhere.
        accepted = list[None]()
        running = [
            asyncio.ensure_future(tokens(replicas.streams, prompt, params, on_accepted=lambda: accepted.append(None)))
            for prompt in prompts
        ]
        await until(lambda: num_unfinished() == [2, 2] and len(accepted) == len(prompts))
        with pytest.raises(QueueFullError, match="2 requests are unfinished, and at most 2 may be"):
            await tokens(replicas.streams, Prompt(PROMPT), params)
        if is_killed:
            await servers[0].kill()
        else:
            await replicas.remove("0")
        # After a crash, one at a time is moved, until it has computed a token.
        moved = 3 if is_killed else 4
        await until(lambda: num_unfinished()[1] == moved or any(task.done() for task in running))
        with pytest.raises(QueueFullError, match=r"[34] requests are unfinished, and at most 2 may be"):
            await tokens(replicas.streams, Prompt(PROMPT), params)
        for each in steps:
            each.allow_all()
        assert await asyncio.gather(*running) == expected


async def test_closing_ends_the_wait_for_a_replica() -> None:
    """The call waited for ever: its replica was no longer followed."""
    cluster = Cluster()
    cluster.hung.add("http://a")
    replicas = cluster.replicas()
    adding = asyncio.ensure_future(replicas.add("a", "http://a"))
    await until(lambda: cluster.timeouts)
    await replicas.close()
    with pytest.raises(ConnectionError, match=r"^replica 'a' was removed before it was up$"):
        await asyncio.wait_for(adding, HANGING)
    assert not replicas.names
    assert all(client.is_closed for client in cluster.made)


async def test_closing_leaves_a_replica_whose_removal_was_cancelled() -> None:
    """Streams that only it can go on with are not waited for: it used to be followed for ever, over its own connection."""
    cluster = Cluster()
    replicas = await cluster.up("a")
    stream = asyncio.ensure_future(anext(replicas.streams.generate(Prompt([1, 2, 3]), GREEDY, "one")))
    await until(lambda: replicas.streams.num_streams("a"))
    (member,) = replicas._members.values()
    removal = asyncio.ensure_future(replicas.remove("a"))
    await until(lambda: member.leaving)
    for task in (removal, stream):
        task.cancel()
    await asyncio.gather(removal, stream, return_exceptions=True)
    await replicas.close()
    assert member.task is not None
    assert member.task.done()
    assert all(client.is_closed for client in cluster.made)


async def test_a_replica_whose_events_break_off_before_it_is_up_has_not_joined() -> None:
    cluster = Cluster()
    cluster.answers["/events"] = answering(breaks=True)
    replicas = cluster.replicas()
    with pytest.raises(ConnectionError, match="replica 'a' at http://a: ReadError"):
        await asyncio.wait_for(replicas.add("a", "http://a"), HANGING)
    assert not replicas.names
    await replicas.close()
    assert all(client.is_closed for client in cluster.made)


async def test_of_two_first_replicas_that_do_not_take_the_same_requests_one_is_refused() -> None:
    cluster, num_described = Cluster(), 0

    async def events() -> AsyncIterator[bytes]:
        nonlocal num_described
        num_described += 1
        await until(lambda: num_described == 2)
        yield encode_record(Kind.HELD) + encode_load(LOAD)
        await asyncio.Event().wait()

    cluster.answers["/events"] = streaming(events)
    cluster.identities["http://b"] = {"block_size": 8}
    replicas = cluster.replicas()
    joining = (replicas.add(name, f"http://{name}") for name in "ab")
    outcomes = await asyncio.gather(*joining, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {type(None), MismatchError}
    assert len(replicas.available) == 1
    await replicas.close()


async def test_what_a_removed_replica_holds_is_not_held_by_its_successor_and_what_it_counts_is_counted() -> None:
    cluster, stores = Cluster(), asyncio.Event()

    async def events(request: httpx.Request) -> httpx.Response:
        async def records() -> AsyncIterator[bytes]:
            yield encode_record(Kind.HELD) + encode_load(LOAD)
            if request.url.host == "old":
                await stores.wait()
                yield encode_record(Kind.STORED, encode_hashes([7])) + load_record(counters={"num_steps": 5})
            await asyncio.Event().wait()

        return await streaming(records)(request)

    async def body() -> AsyncIterator[bytes]:
        yield line(1)
        await asyncio.Event().wait()

    cluster.answers |= {"/events": events, "/generate": streaming(body)}
    cluster.identities["http://new"] = {"weights": "new"}  # so that the stream stays where it is
    replicas = cluster.replicas()
    await replicas.add("a", "http://old")
    async with aclosing(replicas.streams.generate(Prompt([1, 2, 3]), GREEDY, "one")) as stream:
        await anext(stream)
        removal = asyncio.ensure_future(replicas.remove("a"))
        await until(lambda: not replicas.names)
        await replicas.add("a", "http://new")
        stores.set()
        await until(lambda: replicas.counters.totals().get("num_steps") == 5)
        assert replicas.streams.router.holder([7]) is None
    await removal
    await replicas.close()


async def test_a_replica_that_is_removed_reports_what_it_counted_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica reports every fifth of a second, and was left as soon as its last stream had ended."""
    monkeypatch.setattr("radixkv.cluster.replica_set._LOOKS_TO_REPORT", HANGING)
    cluster, is_removed = Cluster(), asyncio.Event()

    async def records() -> AsyncIterator[bytes]:
        yield encode_record(Kind.HELD) + encode_load(LOAD)
        await is_removed.wait()
        yield load_record(counters={"num_steps": 5})
        await asyncio.Event().wait()

    cluster.answers["/events"] = streaming(records)
    replicas = await cluster.up("a")
    removal = asyncio.ensure_future(replicas.remove("a"))
    await until(lambda: not replicas.names)
    for _ in range(100):
        await asyncio.sleep(0)
    is_removed.set()
    await until(lambda: removal.done() or replicas.counters.totals().get("num_steps") == 5)
    assert not removal.done()
    await replicas.close()
    await removal


async def test_a_removed_replica_that_ends_is_no_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is followed for a moment longer, and was said to be down, by a name that another one may have by then."""
    monkeypatch.setattr("radixkv.cluster.replica_set._LOOKS_TO_REPORT", HANGING)
    cluster = Cluster()
    replicas = await cluster.up("a")
    removal = asyncio.ensure_future(replicas.remove("a"))
    await until(lambda: not replicas.names)
    cluster.hung.add("http://a")
    await until(lambda: cluster.made[0].is_closed)
    await replicas.close()
    await removal
    assert not caplog.records
