"""Ingresses over the same replicas know what each of them has sent, before a replica has computed it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.held_steps import HeldSteps
from support.pretended_replicas import LOAD, Cluster, tokens, until
from support.replica_servers import SECRET, LocalReplica, local_replicas, tiny_llm

from radixkv import LLM, SamplingParams
from radixkv.cluster import ReplicaSet
from radixkv.cluster.records import (
    ArrivedRequest,
    Kind,
    decode_arrived,
    decode_hashes,
    decode_number,
    encode_arrived,
    encode_hashes,
    encode_load,
    encode_record,
)
from radixkv.cluster.replica_pins import ReplicaPins
from radixkv.cluster.wire import SENDER_HEADER, encode_request, private_headers
from radixkv.prompts import Prompt
from radixkv.routing import prompt_hashes

FIRST = list(range(100, 150))
LONG = list(range(200, 400))
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


async def answer(replicas: ReplicaSet, token_ids: list[int], params: SamplingParams = PARAMS) -> list[int]:
    return await tokens(replicas.streams, Prompt(token_ids), params)


def others_on(replicas: ReplicaSet, name: str) -> int:
    return len(replicas.streams.router._replicas[name].others)


@asynccontextmanager
async def another_ingress(servers: list[LocalReplica]) -> AsyncIterator[ReplicaSet]:
    replicas = ReplicaSet(SECRET)
    try:
        for number, server in enumerate(servers):
            await replicas.add(str(number), server.url)
        yield replicas
    finally:
        await replicas.close()


@asynccontextmanager
async def two_ingresses(folder: Path, *llms: LLM) -> AsyncIterator[tuple[ReplicaSet, ReplicaSet, list[LocalReplica]]]:
    """Over a replica of each engine."""
    async with local_replicas(folder, *llms) as (one, servers), another_ingress(servers) as two:
        yield one, two, servers


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> list[tuple[ReplicaSet, Kind, bytes]]:
    """What each ingress receives of all replicas."""
    records: list[tuple[ReplicaSet, Kind, bytes]] = []
    note = ReplicaSet._note

    def listen(replicas: ReplicaSet, member: Any, client: httpx.AsyncClient, kind: Kind, payload: bytes) -> None:
        records.append((replicas, kind, payload))
        note(replicas, member, client, kind, payload)

    monkeypatch.setattr(ReplicaSet, "_note", listen)
    return records


async def test_a_prompt_counts_as_work_of_a_replica_while_it_is_pinned(default_tokenizer: Any, tmp_path: Path) -> None:
    """Every ingress took a replica for idle that computed a prompt to pin it."""
    async with two_ingresses(tmp_path, tiny_llm(default_tokenizer)) as (one, two, (server,)):
        states = [each.streams.router._replicas["0"] for each in (one, two)]
        steps = await server.llm.call(HeldSteps)
        pinning = asyncio.ensure_future(ReplicaPins(one).pin(Prompt(LONG), None))
        await until(lambda: others_on(two, "0") == 1)
        assert others_on(one, "0") == 0  # it has sent it itself
        assert [state.queued for state in states] == [len(LONG)] * 2
        steps.allow_all()
        pin = await pinning
        assert pin is not None
        assert pin.active
        await until(lambda: others_on(two, "0") == 0)
        assert [(state.queued, len(state.decoding)) for state in states] == [(0, 0)] * 2


async def test_a_prompt_goes_where_another_ingress_has_sent_its_prefix(default_tokenizer: Any, tmp_path: Path) -> None:
    llms = [tiny_llm(default_tokenizer) for _ in range(2)]
    async with two_ingresses(tmp_path, *llms) as (one, two, servers):
        steps = [await server.llm.call(HeldSteps) for server in servers]
        tasks = [asyncio.ensure_future(answer(one, prompt)) for prompt in (FIRST, LONG)]
        await until(lambda: [others_on(two, name) for name in "01"] == [1, 1])
        assert [others_on(one, name) for name in "01"] == [0, 0]  # it has sent both itself
        # No step has ended, so no report says what replicas have to do: both seem idle, and the first of them would get
        # the next prompt.
        assert all(not load.num_queued for load in two.loads.values())
        holder = two.streams.router.holder(prompt_hashes(LONG, "", 16))
        assert holder == "1"
        tasks.append(asyncio.ensure_future(answer(two, [*LONG, 7, 8, 9])))
        await until(lambda: others_on(one, "1") == 1)
        assert [two.streams.num_streams(name) for name in "01"] == [0, 1]
        for each in steps:
            each.allow_all()
        await asyncio.gather(*tasks)
        await until(lambda: not any(others_on(replicas, name) for replicas in (one, two) for name in "01"))
        late = time.monotonic() + 100.0
        for replicas in (one, two):
            router = replicas.streams.router
            router._clock = lambda: late
            states = router._replicas.values()
            await until(lambda states=states: not any(state.expected for state in states))
            assert not any(state.waiting or state.queued for state in states)
            assert router.holder(prompt_hashes(LONG, "", 16)) == "1"  # as its events say


async def test_a_later_ingress_gets_the_requests_that_wait(default_tokenizer: Any, tmp_path: Path) -> None:
    async with local_replicas(tmp_path, tiny_llm(default_tokenizer, max_num_seqs=1)) as (one, servers):
        (server,) = servers
        steps = await server.llm.call(HeldSteps)
        running = asyncio.ensure_future(answer(one, FIRST, SamplingParams(max_tokens=1500, ignore_eos=True)))
        steps.allow(3)
        await until(lambda: server.llm.stats.num_decoding)
        waiting = asyncio.ensure_future(answer(one, LONG))
        await until(lambda: server.llm.num_unfinished == 2)
        two = ReplicaSet(SECRET)
        adding = asyncio.ensure_future(two.add("0", server.url))
        while not adding.done():  # between two steps, the replica says what it holds
            steps.allow(1)
            await asyncio.sleep(0)
        await adding
        (placement,) = two.streams.router._replicas["0"].waiting
        assert list(placement.block_hashes) == prompt_hashes(LONG, "", 16)
        assert placement.num_tokens == len(LONG)
        running.cancel()
        waiting.cancel()
        steps.allow_all()
        await until(lambda: not others_on(two, "0"))
        await two.close()


async def test_requests_are_announced_to_the_other_ingresses(
    default_tokenizer: Any, tmp_path: Path, received: list[tuple[ReplicaSet, Kind, bytes]]
) -> None:
    async with local_replicas(tmp_path, tiny_llm(default_tokenizer)) as (one, servers):
        await answer(one, FIRST)
        async with another_ingress(servers) as two:
            await answer(one, LONG)
            await until(lambda: (two, Kind.ENDED) in [each[:2] for each in received])
            assert not {Kind.ARRIVED, Kind.PREFILLED, Kind.ENDED} & {kind for who, kind, _ in received if who is one}
            of_one = [(kind, payload) for who, kind, payload in received if who is two and kind is not Kind.LOAD]
            kinds = [kind for kind, _ in of_one]
            begun, prefilled = kinds.index(Kind.ARRIVED), kinds.index(Kind.PREFILLED)
            arrived = decode_arrived(of_one[begun][1], 16)
            assert (arrived.num_tokens, list(arrived.block_hashes)) == (len(LONG), prompt_hashes(LONG, "", 16))
            assert decode_number(of_one[prefilled][1]) == decode_number(of_one[-1][1]) == arrived.number
            # What is not expected any longer has been reported by then.
            stored = b"".join(payload for kind, payload in of_one[begun:prefilled] if kind is Kind.STORED)
            assert set(decode_hashes(stored)) >= set(arrived.block_hashes)


async def test_what_an_ingress_without_events_has_sent_counts_as_work(default_tokenizer: Any, tmp_path: Path) -> None:
    """A sole ingress took a replica for idle that still computed what one had sent that reads its events no longer."""
    async with local_replicas(tmp_path, tiny_llm(default_tokenizer)) as (one, (server,)):
        steps = await server.llm.call(HeldSteps)
        body, headers = encode_request(Prompt(LONG), PARAMS, 0, ""), private_headers(SECRET, 1)
        answering = asyncio.ensure_future(one._clients["0"].post("/generate", content=body, headers=headers))
        await until(lambda: others_on(one, "0") == 1)
        assert one.streams.router._replicas["0"].queued == len(LONG)
        steps.allow_all()
        await answering
        await until(lambda: not others_on(one, "0"))


async def test_a_request_that_is_aborted_is_expected_no_longer(
    default_tokenizer: Any, tmp_path: Path, received: list[tuple[ReplicaSet, Kind, bytes]]
) -> None:
    async with two_ingresses(tmp_path, tiny_llm(default_tokenizer)) as (one, two, servers):
        steps = await servers[0].llm.call(HeldSteps)
        task = asyncio.ensure_future(answer(one, LONG))
        await until(lambda: others_on(two, "0") == 1)
        task.cancel()
        await until(lambda: others_on(two, "0") == 0)
        steps.allow_all()
        of_two = [kind for who, kind, _ in received if who is two and kind is not Kind.LOAD]
        assert of_two == [Kind.HELD, Kind.ARRIVED, Kind.ENDED]


async def test_a_request_that_is_refused_is_expected_no_longer(
    default_tokenizer: Any, tmp_path: Path, received: list[tuple[ReplicaSet, Kind, bytes]]
) -> None:
    async with two_ingresses(tmp_path, tiny_llm(default_tokenizer)) as (one, two, _):
        with pytest.raises(ValueError, match="3000 tokens"):
            await answer(one, [7] * 3000)
        await until(lambda: (two, Kind.ENDED) in [each[:2] for each in received])
        assert others_on(two, "0") == 0


async def test_a_reader_that_begins_anew_discards_what_it_had_read() -> None:
    cluster = Cluster()
    held, load = encode_record(Kind.HELD), encode_load(LOAD)
    first, second = (encode_arrived(ArrivedRequest(number, 40, [number, 10 * number])) for number in (1, 2))
    cluster.events["http://a"] = [held, first, held, second, load]
    replicas = await cluster.up("a")
    state = replicas.streams.router._replicas["a"]
    assert list(state.others) == [2]
    assert (state.queued, state.expected) == (40, {2, 20})
    await replicas.close()


async def test_a_report_that_crosses_the_end_of_a_request_does_not_send_the_next_one_elsewhere() -> None:
    """It used to count that request as another ingress's, until the next report."""
    cluster = Cluster()
    held, busy = encode_record(Kind.HELD), replace(LOAD, num_decoding=9, num_queued=9, num_queued_tokens=900)
    stored = encode_record(Kind.STORED, encode_hashes([1, 2, 3, 4]))
    cluster.events |= {"http://a": [held, stored, encode_load(busy)], "http://b": [held, encode_load(LOAD)]}
    replicas = await cluster.up(*"ab")
    router = replicas.streams.router
    assert replicas.loads["a"].num_decoding == 9
    for _ in range(2):
        placement = router.choose([1, 2, 3, 4], 70)
        assert placement is not None
        assert placement.replica == "a"
        router.finish(placement)
    await replicas.close()


async def test_malformed_shares_are_refused(default_tokenizer: Any, tmp_path: Path) -> None:
    """A list used to end as an error of the server."""
    async with local_replicas(tmp_path, tiny_llm(default_tokenizer)) as (one, _):
        headers = {"Authorization": f"Bearer {SECRET}"}
        for body in (b"[]", b"7", b'{"ann": "all"}', b'{"ann": {"wait": 1}}', b"{"):
            assert (await one._clients["0"].put("/tenants", content=body, headers=headers)).status_code == 400, body


async def test_senders_are_numbers(default_tokenizer: Any, tmp_path: Path) -> None:
    async with local_replicas(tmp_path, tiny_llm(default_tokenizer)) as (one, _):
        body = encode_request(Prompt(FIRST), PARAMS, 0, "")
        for sender in ("", "one", "-1", "1" + 16 * "0"):
            headers = {"Authorization": f"Bearer {SECRET}", SENDER_HEADER: sender}
            refused = await one._clients["0"].post("/generate", content=body, headers=headers)
            assert refused.status_code == 400, sender
        answer = await one._clients["0"].post("/generate", content=body, headers={"Authorization": f"Bearer {SECRET}"})
        assert answer.status_code == 200
