"""Which tokens followed each token: what a structure repeats between its values, such as quotes, commas and spaces."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from radixkv.cache.node import Node
from radixkv.cache.observer import TreeObserver
from radixkv.namespaces import is_derived

# How many different followers of a token are kept, and of how many tokens.
_MOST = 4
_MOST_TOKENS = 4096
# Most namespaces of which followers are kept.
_MAX_NAMESPACES = 32


class Followers:
    """Which tokens followed each token in some answers.

    Attributes:
        by_token: for each token, those that followed it, the most recent first.
    """

    def __init__(self) -> None:
        self.by_token: dict[int, list[int]] = {}

    def note(self, sequence: Sequence[int], start: int) -> None:
        """Note which token follows which in a sequence, from the follower at position ``start``, at least 1, on."""
        for position in range(start, len(sequence)):
            token, before = sequence[position], sequence[position - 1]
            # Entered anew, because the token noted longest ago is the first to be forgotten.
            known = self.by_token.pop(before, [])
            if token in known:
                known.remove(token)
            self.by_token[before] = [token, *known[: _MOST - 1]]
        while len(self.by_token) > _MOST_TOKENS:
            del self.by_token[next(iter(self.by_token))]


class NamespaceFollowers(TreeObserver):
    """The followers in the answers of each namespace, forgotten when that is cleared; an observer of the cache."""

    def __init__(self) -> None:
        self._by_namespace: OrderedDict[str, Followers] = OrderedDict()

    def of(self, namespace: str) -> Followers:
        """Those of a namespace. Of the namespaces used longest ago, they are forgotten."""
        followers = self._by_namespace.setdefault(namespace, Followers())
        self._by_namespace.move_to_end(namespace)
        if len(self._by_namespace) > _MAX_NAMESPACES:
            self._by_namespace.popitem(last=False)
        return followers

    def on_clear(self, namespace: str | None, nodes: Sequence[Node]) -> None:
        """Forget those of a namespace and of all derived from it, which the tree may no longer have, or everything."""
        for name in list(self._by_namespace):
            if namespace is None or name == namespace or is_derived(name, namespace):
                del self._by_namespace[name]
