"""Ways to choose a replica, for comparison: `Router`'s, and those in common use."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from radixkv.cache import CacheEvent
from radixkv.routing import Placement, Router


class Chooser:
    """Chooses replicas, numbered from 0 on.

    After `choose`, `prefilled` and `finish` are called for every request; and shortly after each, when all ingresses
    are notified, `expect`, `expected_prefilled` and `expected_finished`. All but `choose` do nothing by default.
    """

    def choose(self, request: int, blocks: Sequence[int], num_tokens: int) -> int:
        """The replica for a request.

        Args:
            request: its number.
            blocks: hashes of its prompt's blocks.
            num_tokens: of its prompt.
        """
        raise NotImplementedError

    def expect(self, replica: int, request: int, blocks: Sequence[int], num_tokens: int) -> None:
        """A replica has reported to all ingresses that it received a request, see `Router.expect`."""

    def expected_prefilled(self, replica: int, request: int) -> None:
        """It has reported that the request's prompt is computed, see `Router.expected_prefilled`."""

    def expected_finished(self, replica: int, request: int) -> None:
        """It has reported that the request has ended, see `Router.expected_finished`."""

    def prefilled(self, request: int) -> None:
        """The request's first token has come."""

    def finish(self, request: int) -> None:
        """The request has ended."""

    def update(self, replica: int, event: CacheEvent) -> None:
        """A replica's cache has changed."""

    def report(self, replica: int, seconds_per_token: float | None) -> None:
        """How fast a replica is, see `Router.report`."""


class _Counting(Chooser):
    """What the simple ways have in common: they count each replica's unfinished requests."""

    def __init__(self, num_replicas: int, seed: int) -> None:
        self.num_ongoing = [0] * num_replicas
        self.random = random.Random(seed)
        self._sent: dict[int, int] = {}

    def choose(self, request: int, blocks: Sequence[int], num_tokens: int) -> int:
        replica = self._choose(request, blocks)
        self._sent[request] = replica
        self.num_ongoing[replica] += 1
        return replica

    def _choose(self, request: int, blocks: Sequence[int]) -> int:
        raise NotImplementedError

    def finish(self, request: int) -> None:
        self.num_ongoing[self._sent.pop(request)] -= 1


class RoundRobin(_Counting):
    """One after another."""

    def _choose(self, request: int, blocks: Sequence[int]) -> int:
        return request % len(self.num_ongoing)


class PowerOfTwo(_Counting):
    """The one with fewer unfinished requests of two random replicas (Mitzenmacher 2001); the default of Ray Serve."""

    def _choose(self, request: int, blocks: Sequence[int]) -> int:
        return self.least_of(self.random.sample(range(len(self.num_ongoing)), min(2, len(self.num_ongoing))))

    def least_of(self, replicas: Sequence[int]) -> int:
        """The one with the fewest unfinished requests."""
        return min(replicas, key=lambda replica: self.num_ongoing[replica])


class SessionAffinity(_Counting):
    """A session stays where it began, by the hash of its name.

    Traces do not name sessions. A request joins the session that first had the last of its known blocks; but from the third
    request on whose known blocks end with the same one, each begins a session of its own.
    """

    def __init__(self, num_replicas: int, seed: int) -> None:
        super().__init__(num_replicas, seed)
        self._session: dict[int, int] = {}
        self._branches: dict[int, int] = {}

    def _choose(self, request: int, blocks: Sequence[int]) -> int:
        known = [block for block in blocks if block in self._session]
        session = request
        if known:
            last = known[-1]
            self._branches[last] = self._branches.get(last, 0) + 1
            if self._branches[last] <= 2:
                session = self._session[last]
        for block in blocks:
            self._session.setdefault(block, session)
        return zlib.crc32(b"%d" % session) % len(self.num_ongoing)


class FewestUnfinished(PowerOfTwo):
    """The one with the fewest unfinished requests of all replicas."""

    def _choose(self, request: int, blocks: Sequence[int]) -> int:
        return self.least_of(range(len(self.num_ongoing)))


class RayPrefixAffinity(PowerOfTwo):
    """`PrefixCacheAffinityRouter` of Ray Serve LLM as it chooses by default, over the tree of prefixes from Ray's package.

    Ray's tree holds characters; here each block is one. What its router does around the tree (actors, probes of queues) needs
    a cluster, and is restated here: prompts of which the tree knows less than a tenth go to the replicas with the smallest
    trees, others to those with the longest match; among several, to the one with the fewest unfinished requests of two.

    Raises:
        ImportError: ``ray`` is not installed.
    """

    _MATCH_RATE = 0.1

    def __init__(self, num_replicas: int, seed: int) -> None:
        super().__init__(num_replicas, seed)
        from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import PrefixTree

        self._tree = PrefixTree()
        self._names = [str(number) for number in range(num_replicas)]
        self._tree.add_tenants(self._names, 0.0)
        self._characters: dict[int, str] = {}

    def _choose(self, request: int, blocks: Sequence[int]) -> int:
        # One character stands for each distinct block.
        text = "".join(self._characters.setdefault(block, _character(len(self._characters))) for block in blocks)
        matched, names = self._tree.prefix_match(text, self._names)
        if not text or len(matched) / len(text) < self._MATCH_RATE:
            names = self._tree.get_smallest_tenants()
        candidates = [int(name) for name in names or self._names]
        replica = self.least_of(self.random.sample(candidates, min(2, len(candidates))))
        self._tree.insert(text, str(replica), float(request))
        return replica


class Prefix(Chooser):
    """`radixkv.routing.Router`, one for each ingress. All replicas report to it, also the requests of other ingresses.

    Args:
        num_replicas: how many they choose from.
        routers: of the ingresses; a request comes to one of them at random.
        seed: of that random choice.
    """

    def __init__(self, num_replicas: int, routers: Sequence[Router], seed: int) -> None:
        self._routers = routers
        self._random = random.Random(seed)
        # Kept until all ingresses are notified of a request's end.
        self._sent: dict[int, tuple[Router, Placement]] = {}
        for router in routers:
            for number in range(num_replicas):
                router.add(str(number))

    def choose(self, request: int, blocks: Sequence[int], num_tokens: int) -> int:
        router = self._random.choice(self._routers)
        placement = router.choose(blocks, num_tokens)
        assert placement is not None
        self._sent[request] = router, placement
        return int(placement.replica)

    def expect(self, replica: int, request: int, blocks: Sequence[int], num_tokens: int) -> None:
        sender, _ = self._sent[request]
        for router in self._routers:
            if router is not sender:
                router.expect(str(replica), request, blocks, num_tokens)

    def expected_prefilled(self, replica: int, request: int) -> None:
        for router in self._routers:
            router.expected_prefilled(str(replica), request)

    def expected_finished(self, replica: int, request: int) -> None:
        del self._sent[request]
        for router in self._routers:
            router.expected_finished(str(replica), request)

    def prefilled(self, request: int) -> None:
        router, placement = self._sent[request]
        router.prefilled(placement)

    def finish(self, request: int) -> None:
        router, placement = self._sent[request]
        router.finish(placement)

    def update(self, replica: int, event: CacheEvent) -> None:
        for router in self._routers:
            router.update(str(replica), event)

    def report(self, replica: int, seconds_per_token: float | None) -> None:
        for router in self._routers:
            router.report(str(replica), seconds_per_token)


PREFIX = "prefix"
ONE_CACHE = "one-cache"
# Those that `PREFIX` is compared with, each made from a number of replicas and a seed.
OTHERS: Mapping[str, Callable[[int, int], Chooser]] = MappingProxyType(
    {
        "round-robin": RoundRobin,
        "power-of-two": PowerOfTwo,
        "session": SessionAffinity,
        "ray-prefix": RayPrefixAffinity,
        ONE_CACHE: FewestUnfinished,
    }
)
ROUTERS = (PREFIX, *OTHERS)


def _character(number: int) -> str:
    # Without the surrogates, which are not characters.
    return chr(number if number < 0xD800 else number + 0x800)
