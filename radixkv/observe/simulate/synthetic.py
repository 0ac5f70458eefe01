"""Synthetic traces of different workloads, to compare policies on more than one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import numpy as np

from radixkv.observe.simulate.trace import Trace, TracedRequest

_BLOCK_SIZE = 64
_Pieces = tuple[float, list[int], int]  # arrival time, blocks of the prompt, number of blocks of the answer


def chats(num_requests: int = 6000, seed: int = 0) -> Trace:
    """Conversations under one system prompt: users send the next message after a minute or two, or not at all."""
    rng = np.random.default_rng(seed)
    ids = itertools.count()
    system = _new(ids, 8)

    def conversation(start: float) -> Iterator[_Pieces]:
        history = system + _new(ids, 1 + int(rng.geometric(0.15)))
        time = start
        while True:
            answer = 1 + int(rng.geometric(0.3))
            yield time, list(history), answer
            if rng.random() > 0.65:
                return
            time += float(rng.lognormal(4.5, 0.8))
            history = history + [-1] * answer + _new(ids, 1 + int(rng.geometric(0.4)))

    return _gather(conversation, rng, num_requests, 0.8, ids)


def agents(num_requests: int = 6000, seed: int = 0) -> Trace:
    """A few agents with long system prompts, whose steps follow each other within seconds, dozens to a task."""
    rng = np.random.default_rng(seed)
    ids = itertools.count()
    systems = [_new(ids, 100) for _ in range(12)]

    def task(start: float) -> Iterator[_Pieces]:
        history = systems[int(rng.zipf(1.5)) % len(systems)] + _new(ids, 4)
        time = start
        for _ in range(int(rng.geometric(0.08))):
            yield time, list(history), 2
            time += float(rng.exponential(8.0))
            history = history + [-1] * 2 + _new(ids, 1 + int(rng.geometric(0.25)))

    return _gather(task, rng, num_requests, 6.0, ids)


def documents(num_requests: int = 6000, seed: int = 0) -> Trace:
    """Questions about documents, whose popularity follows Zipf's law; questions hardly repeat."""
    rng = np.random.default_rng(seed)
    ids = itertools.count()
    system = _new(ids, 4)
    library = [_new(ids, 20 + int(rng.integers(60))) for _ in range(3000)]

    def question(start: float) -> Iterator[_Pieces]:
        document = library[(int(rng.zipf(1.2)) - 1) % len(library)]
        yield start, [*system, *document, *_new(ids, 2)], 3

    return _gather(question, rng, num_requests, 0.5, ids)


def scans(num_requests: int = 6000, seed: int = 0) -> Trace:
    """Chats, and long batch jobs that read every document of a collection once."""
    rng = np.random.default_rng(seed)
    ids = itertools.count()
    system = _new(ids, 8)

    def visitor(start: float) -> Iterator[_Pieces]:
        if rng.random() < 0.02:
            for number in range(100):
                yield start + number * 0.3, _new(ids, 60), 1
            return
        history, time = system + _new(ids, 6), start
        for _ in range(int(rng.geometric(0.35))):
            yield time, list(history), 2
            time += float(rng.lognormal(4.0, 0.7))
            history = history + [-1] * 2 + _new(ids, 2)

    return _gather(visitor, rng, num_requests, 0.6, ids)


def long_documents(num_requests: int = 6000, seed: int = 0) -> Trace:
    """Documents of 15,000 tokens in the mean, a few questions about each; whether there is another one is chance."""
    rng = np.random.default_rng(seed)
    ids = itertools.count()

    def reader(start: float) -> Iterator[_Pieces]:
        document = _new(ids, 8 + int(rng.gamma(4.0, 55.0)))
        time = start
        while True:
            yield time, [*document, *_new(ids, 1)], 2
            if rng.random() > 0.6:
                return
            time += float(rng.exponential(240.0))

    return _gather(reader, rng, num_requests, 5.0, ids)


def mixed(num_requests: int = 4000, seed: int = 0) -> Trace:
    """Long documents with several questions each, and short chats; most return late, and whether they do is chance.

    How long and how many documents are, and when they return, differs from seed to seed.
    """
    rng = np.random.default_rng(seed)
    ids = itertools.count()
    share, mean_questions = float(rng.uniform(0.3, 0.9)), float(rng.uniform(4, 9))
    mean_length, shape = int(rng.choice([200, 280, 360])), float(rng.choice([0.7, 1.5, 4.0]))
    mean_pause = float(rng.choice([300.0, 900.0, 2000.0]))
    count: Callable[[], int] = [
        lambda: int(rng.geometric(1 / mean_questions)),
        lambda: 1 + int(rng.poisson(mean_questions - 1)),
        lambda: 1 if rng.random() < 0.5 else 1 + int(rng.poisson(2 * mean_questions - 2)),
    ][int(rng.integers(3))]

    def visit(start: float) -> Iterator[_Pieces]:
        time = start
        if rng.random() < share:
            document = _new(ids, 16 + int(rng.gamma(shape, mean_length / shape)))
            for _ in range(count()):
                yield time, [*document, *_new(ids, 4)], 2
                time += float(rng.exponential(mean_pause))
            return
        history = _new(ids, 8 * int(1 + rng.geometric(0.4)))
        for _ in range(int(rng.geometric(0.25))):
            yield time, list(history), 8
            time += float(rng.exponential(mean_pause))
            history = history + [-1] * 8 + _new(ids, 8)

    return _gather(visit, rng, num_requests, mean_questions * share + 4 * (1 - share), ids)


SYNTHETIC: Mapping[str, Callable[[], Trace]] = MappingProxyType(
    {
        "chats": chats,
        "agents": agents,
        "documents": documents,
        "long-documents": long_documents,
        "mixed": mixed,
        "scans": scans,
    }
)


def _new(ids: Iterator[int], count: int) -> list[int]:
    return list(itertools.islice(ids, count))


def _gather(
    visit: Callable[[float], Iterator[_Pieces]],
    rng: np.random.Generator,
    num_requests: int,
    mean_gap: float,
    ids: Iterator[int],
) -> Trace:
    """Visits that start at random times, their requests in order of time. A -1 in a prompt is a block of an answer."""
    requests: list[TracedRequest] = []
    start = 0.0
    while len(requests) < num_requests:
        start += float(rng.exponential(mean_gap))
        answers: list[int] = []
        for time, pieces, num_answer_blocks in visit(start):
            pending = iter(answers)
            prompt = [next(pending) if block == -1 else block for block in pieces]
            output = _new(ids, num_answer_blocks)
            answers += output
            requests.append(TracedRequest(time, np.array(prompt, np.int32), np.array(output, np.int32)))
    requests.sort(key=lambda request: request.time)
    return Trace(requests[:num_requests], _BLOCK_SIZE)
