"""On a real Ray: replicas that are killed, exchanged and scaled while streams run, of which none is lost or changed."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from radixkv.model.default_model import find_default_model
from radixkv.model.gguf.conversion import ensure_converted
from radixkv.ray import local
from radixkv.ray.options import ApplicationOptions

NUM_STREAMS = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights, and the default model's tokenizer."""
    return made_model(tmp_path_factory.mktemp("tiny"), seed=0)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights."""
    return made_model(tmp_path_factory.mktemp("other"), seed=1)


def made_model(folder: Path, seed: int) -> Path:
    """A tiny model in this folder."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )
    tiny = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in tiny.parameters():
            parameter.mul_(8)  # else all tokens are equally likely
    tiny.save_pretrained(folder)
    source = ensure_converted(find_default_model(), print)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(source / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def deploy(model: Path) -> Iterator[Callable[..., str]]:
    """Deploys the application, or another version of it, and returns its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    from ray import serve

    from radixkv.ray.application import build

    def run(**options: Any) -> str:
        arguments = {
            "model": str(model),
            "served_model_name": ["tiny"],
            "port": port,
            "dtype": "float32",
            "num_blocks": 1000,
            "num_cpus": 1,
            "grace_seconds": 20.0,
            **options,
        }
        described = replace(ApplicationOptions.of(arguments), replica_host="127.0.0.1")
        serve.run(build(described), name="radixkv", route_prefix=None)
        return f"http://127.0.0.1:{port}"

    with local._ray(replace_placement()):
        serve.start(proxy_location="Disabled")
        yield run
        serve.shutdown()


def replace_placement() -> Any:
    """Make room for four replicas and two ingresses."""
    return ApplicationOptions.of({"port": 0, "replicas": 4, "ingresses": 2}).placement


def processes(deployment: str) -> list[int]:
    """The processes of the replicas of one of the application's deployments."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if path.read_text().startswith(f"ray::ServeReplica:radixkv:{deployment}"):
                found.append(int(path.parent.name))
        except OSError:  # it has ended
            continue
    return found


def engines() -> list[int]:
    """Processes with an engine."""
    return processes("Engine")


async def until(condition: Callable[[], bool]) -> None:
    """Wait, however long it takes: half an hour only ends what hangs."""
    async with asyncio.timeout(1800):
        while not condition():
            await asyncio.sleep(0.1)


@asynccontextmanager
async def client(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, timeout=1800, limits=httpx.Limits(max_connections=None)) as opened:
        yield opened


async def answer(http: httpx.AsyncClient, number: int, max_tokens: int, begun: asyncio.Event | None = None) -> str:
    """The text of one stream.

    Args:
        begun: set when its first token is there.
    """
    body = {
        "model": "tiny",
        "prompt": f"Story number {number} of the fox and the hen",
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "seed": number,
        "temperature": number % 2,
        "stream": True,
    }
    text, done = "", False
    async with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            data = line.removeprefix("data: ")
            done = data == "[DONE]"
            if line.startswith("data: ") and not done:
                event = json.loads(data)
                assert "error" not in event, event
                text += "".join(choice["text"] for choice in event["choices"])
                if begun is not None:
                    begun.set()
            if done:
                break
    assert done
    return text


async def answers(url: str, begun: asyncio.Event | None = None) -> list[str]:
    """Long answers: none has ended when the first token of one is there."""
    async with client(url) as http:
        return await asyncio.gather(*(answer(http, number, 600, begun) for number in range(NUM_STREAMS)))


async def under_load(
    url: str, change: Callable[[], Awaitable[object]], num_clients: int, max_tokens: int = 20
) -> list[set[str]]:
    """Make a change while clients send the same request over and over; returns what they got. None may fail."""
    done = asyncio.Event()

    async def send(number: int) -> set[str]:
        texts = set()
        async with client(url) as http:
            while not done.is_set():
                texts.add(await answer(http, number, max_tokens))
        return texts

    senders = [asyncio.ensure_future(send(number)) for number in range(num_clients)]
    try:
        await change()
    finally:
        done.set()
    return await asyncio.gather(*senders)


def test_streams_survive_a_killed_replica_which_is_replaced(deploy: Callable[..., str]) -> None:
    url = deploy(replicas=2)

    async def main() -> None:
        expected = await answers(url)
        await until(lambda: len(engines()) == 2)
        victim, other = engines()
        begun = asyncio.Event()
        running = asyncio.ensure_future(answers(url, begun))
        await asyncio.wait([running, asyncio.ensure_future(begun.wait())], return_when=asyncio.FIRST_COMPLETED)
        os.kill(victim, signal.SIGKILL)
        assert await running == expected
        await until(lambda: len(engines()) == 2 and victim not in engines())
        assert other in engines()
        assert await answers(url) == expected

    asyncio.run(main())
    (ingress,) = processes("Ingress")
    assert "libtorch" not in Path(f"/proc/{ingress}/maps").read_text()  # it computes nothing
    assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in (ingress, *engines())} == {os.nice(0)}


def test_an_update_of_the_weights_loses_no_request_and_mixes_no_answer(deploy: Callable[..., str], other: Path) -> None:
    num_clients = 2  # one for each replica: more would only take the processors from those that start

    async def texts(url: str) -> list[str]:
        async with client(url) as http:
            return await asyncio.gather(*(answer(http, number, 20) for number in range(num_clients)))

    async def main() -> None:
        url = deploy(replicas=2)
        old_engines = set(engines())
        old = await texts(url)
        given = await under_load(url, lambda: asyncio.to_thread(deploy, replicas=2, model=str(other)), num_clients)
        await until(lambda: not old_engines & set(engines()))
        new = await texts(url)
        for one, another, answered in zip(old, new, given, strict=True):
            assert one != another
            assert {one, another} >= answered > set()

    asyncio.run(main())


@pytest.mark.nightly
def test_an_update_loses_no_request(deploy: Callable[..., str]) -> None:
    url = deploy(replicas=2)
    before = set(engines())
    texts = asyncio.run(under_load(url, lambda: asyncio.to_thread(deploy, replicas=2, max_queue=100), NUM_STREAMS))
    assert [len(each) for each in texts] == [1] * NUM_STREAMS
    asyncio.run(until(lambda: not before & set(engines())))


@pytest.mark.nightly
def test_replicas_follow_the_load(deploy: Callable[..., str]) -> None:
    options = {"replicas": 1, "max_replicas": 4, "requests_per_replica": 2, "scale_up_delay": 1, "scale_down_delay": 3}
    url = deploy(**options)

    async def main() -> None:
        await until(lambda: len(engines()) == 1)  # those of the application before end meanwhile
        texts = await under_load(url, lambda: until(lambda: len(engines()) == 4), NUM_STREAMS, max_tokens=200)
        assert [len(each) for each in texts] == [1] * NUM_STREAMS
        # As many as one replica is for: the others go, while requests run.
        async with client(url) as http:
            while len(engines()) > 1:
                await answer(http, 1, 50)

    asyncio.run(main())
