"""Replicas on hosts of their own, one of which is cut off: no connection breaks, and nothing comes any more."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.network_hosts import Host, hosts
from support.replica_servers import SECRET

from radixkv.bench.serving.server_process import BenchProcess

PORT = 9000
ADMIN = {"Authorization": "Bearer administrator"}


@asynccontextmanager
async def running_cluster(model: Path, machines: list[Host]) -> AsyncIterator[httpx.AsyncClient]:
    """A replica on each host, named by its address, and an ingress here."""
    environment = {"RADIXKV_REPLICA_SECRET": SECRET}
    processes: list[BenchProcess] = []
    try:
        for host in machines:
            listening = ["replica", str(model), "--listen", f"{host.address}:{PORT}"]
            processes.append(BenchProcess(listening, environment, within=host.command))
            processes[-1].start()
        for replica in processes:
            await asyncio.to_thread(replica.wait_until_up)
        named = [part for host in machines for part in ("--replica", f"{host.address}=http://{host.address}:{PORT}")]
        ingress = BenchProcess(
            ["ingress", str(model), "--port", "0", "--admin-key", "administrator", *named], environment
        )
        processes.append(ingress)
        ingress.start()
        await asyncio.to_thread(ingress.wait_until_up)
        async with httpx.AsyncClient(base_url=ingress.address, timeout=1800) as client:
            while not all(each["up"] for each in (await states(client)).values()):
                pass
            yield client
    finally:
        for process in processes:
            process.kill()


async def states(client: httpx.AsyncClient) -> dict[str, dict[str, Any]]:
    answer = await client.get("/admin/replicas", headers=ADMIN)
    return {each["name"]: each for each in answer.json()["replicas"]}


async def stream(client: httpx.AsyncClient, number: int, begun: asyncio.Event) -> str:
    """The text of a long answer; ``begun`` is set when a part of it is there."""
    body = {
        "prompt": [*range(1000 * number, 1000 * number + 64)],
        "max_tokens": 1500,
        "temperature": 1,
        "seed": number,
        "ignore_eos": True,
        "stream": True,
    }
    text = ""
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                if text:
                    begun.set()
    return text


@pytest.mark.nightly
def test_streams_of_a_host_that_is_cut_off_go_on_elsewhere(tiny_model_folder: Path) -> None:
    async def begin(client: httpx.AsyncClient) -> list[asyncio.Task[str]]:
        begun = [asyncio.Event() for _ in range(8)]
        tasks = [asyncio.ensure_future(stream(client, number, each)) for number, each in enumerate(begun)]
        await asyncio.gather(*(each.wait() for each in begun))
        return tasks

    async def main(machines: list[Host]) -> None:
        async with running_cluster(tiny_model_folder, machines) as client:
            expected = await asyncio.gather(*await begin(client))
            lost, kept = machines
            tasks = await begin(client)
            await asyncio.to_thread(lost.cut_off)
            assert (await states(client))[lost.address]["streams"]
            assert await asyncio.gather(*tasks) == expected
            after = await states(client)
            assert [after[host.address]["up"] for host in (lost, kept)] == [False, True]
            await asyncio.to_thread(lost.connect)
            while not (await states(client))[lost.address]["up"]:
                await asyncio.sleep(0)
            assert await asyncio.gather(*await begin(client)) == expected

    with hosts(2) as machines:
        asyncio.run(main(machines))
