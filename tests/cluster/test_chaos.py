"""`kill -9` of a replica while it answers: every stream completes with exactly the text of an undisturbed run."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.preloaded_process import COMMAND_LINE, PreloadedProcess
from support.replica_servers import SECRET

from radixkv import LLM, SamplingParams, StructuredOutputsParams
from radixkv.cluster import ReplicaSet, create_ingress
from radixkv.prompts import Prompt
from radixkv.server.config import ServerConfig
from radixkv.serving.request_stream import RequestStream

OPTIONS = {"num_blocks": 600, "dtype": "float32"}
SCHEMA = {"type": "array", "items": {"type": "integer"}, "minItems": 40, "maxItems": 60}
KINDS = (
    {"temperature": 0.0, "max_tokens": 250},
    {"seed": 11, "max_tokens": 250},
    {"seed": 12, "max_tokens": 300, "structured_outputs": StructuredOutputsParams(json=SCHEMA)},
    {"seed": 13, "max_tokens": 250, "stop": ["qu", "zz"], "min_tokens": 60},
)
NUM_STREAMS = 20


class ReplicaProcess:
    """A real `radixkv replica`."""

    def __init__(self, model: Path, socket: Path) -> None:
        self.url = f"unix://{socket}"
        self.process = PreloadedProcess(
            COMMAND_LINE,
            *("replica", str(model), "--listen", f"unix:{socket}"),
            *("--dtype", "float32", "--num-blocks", "600"),
        )

    def wait_until_up(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("Serving a replica of "), line

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(600)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def replica_processes(tiny_model_folder: Path, tmp_path: Path) -> Iterator[dict[str, ReplicaProcess]]:
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setenv("RADIXKV_REPLICA_SECRET", SECRET)
        replicas = {}
        for name in ("one", "two"):
            replicas[name] = ReplicaProcess(tiny_model_folder, tmp_path / f"{name}.sock")
            stack.callback(replicas[name].stop)
        for replica in replicas.values():
            replica.wait_until_up()
        yield replicas


def requests() -> list[tuple[Prompt, SamplingParams]]:
    return [
        (Prompt([*range(300, 340), number]), SamplingParams(ignore_eos=True, **KINDS[number % len(KINDS)]))
        for number in range(NUM_STREAMS)
    ]


async def read(stream: RequestStream, started: asyncio.Event) -> tuple[str, list[int], str | None]:
    text, token_ids, reason = "", [], None
    async for delta in stream:
        (output,) = delta.outputs
        text += output.text
        token_ids += output.token_ids
        reason = output.finish_reason
        if len(token_ids) > 20:
            started.set()
    return text, token_ids, reason


@pytest.mark.slow
async def test_every_stream_completes_although_a_replica_is_killed(
    replica_processes: dict[str, ReplicaProcess], tiny_model_folder: Path
) -> None:
    alone = LLM(str(tiny_model_folder), **OPTIONS)
    prompts, params = zip(*requests(), strict=True)
    outputs = alone.generate([{"prompt_token_ids": prompt.token_ids} for prompt in prompts], params, use_tqdm=False)
    parts = [part for output in outputs for part in output.outputs]
    expected = [(part.text, part.token_ids, part.finish_reason) for part in parts]
    replicas = ReplicaSet(SECRET)
    for name, replica in replica_processes.items():
        await replicas.add(name, replica.url)
    ingress = create_ingress(ServerConfig(), replicas)
    started = asyncio.Event()
    streams = [
        (await ingress.llm.submit([prompt], params, f"stream-{number}"))[0]
        for number, (prompt, params) in enumerate(requests())
    ]
    reading = [asyncio.ensure_future(read(stream, started)) for stream in streams]
    await started.wait()
    victim = max(replica_processes, key=replicas.streams.num_streams)
    num_hit = replicas.streams.num_streams(victim)
    replica_processes[victim].process.send_signal(signal.SIGKILL)
    answers = await asyncio.gather(*reading)
    assert num_hit
    for answer, right in zip(answers, expected, strict=True):
        assert answer == right
    assert replicas.available == [name for name in replica_processes if name != victim]
    assert await ingress.llm.shutdown()
    await replicas.close()
