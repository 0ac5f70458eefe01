"""What is kept of prefixes that are to go down, and of blocks that are below, against lists."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from radixkv.tiers.moves.known_blocks import KnownBlocks
from radixkv.tiers.moves.wanted_prefixes import WantedPrefix, WantedPrefixes


def drained(wanted: WantedPrefixes) -> list[tuple[str, int]]:
    """Each prefix's namespace and number of blocks, in turn."""
    found = []
    while wanted:
        first = wanted.first()
        found.append((first.namespace, len(first.hashes)))
        wanted.remove_first()
    return found


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "add", "add first", "remove first", "forget"]),
            st.sampled_from("ab"),
            st.integers(1, 12),
        )
    )
)
def test_wanted_prefixes_wait_in_turn_and_take_bounded_memory(steps: list[tuple[str, str, int]]) -> None:
    wanted = WantedPrefixes()
    waiting: list[tuple[str, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("radixkv.tiers.moves.wanted_prefixes._MAX_BLOCKS", 10)
        for step, namespace, size in steps:
            prefix, same = WantedPrefix(namespace, b"", range(size)), (namespace, size)
            if step == "add":
                wanted.add(prefix)
                if same not in waiting and (not waiting or sum(n for _, n in waiting) + size <= 10):
                    waiting.append(same)
            elif step == "add first":
                wanted.add_first(prefix)
                waiting = [same, *(each for each in waiting if each != same)]
                while len(waiting) > 1 and sum(n for _, n in waiting) > 10:
                    waiting.pop()
            elif step == "forget":
                wanted.forget(lambda each, gone=namespace: each == gone)
                waiting = [each for each in waiting if each[0] != namespace]
            elif waiting:
                assert (wanted.first().namespace, len(wanted.first().hashes)) == waiting.pop(0)
                wanted.remove_first()
            assert len(wanted) == len(waiting)
        assert drained(wanted) == waiting
        for size in (6, 4, 1):
            wanted.add(WantedPrefix("", b"", range(size)))
        assert drained(wanted) == [("", 6), ("", 4)]


@given(
    st.integers(1, 6),
    st.lists(
        st.tuples(
            st.sampled_from(["add", "add", "discard", "lost", "clear group"]),
            st.lists(st.integers(0, 9), min_size=1),
            st.sampled_from(["a", "a/salt", "b"]),
        )
    ),
)
@example(4, [("add", [0], "a"), ("add", [1], "b"), ("clear group", [0], "b"), ("lost", [1], "b")])
def test_the_blocks_that_were_put_last_are_known(capacity: int, steps: list[tuple[str, list[int], str]]) -> None:
    """Those of groups that are cleared take the room of others until they would have been forgotten anyway."""
    known, groups = KnownBlocks(capacity), dict[int, str | None]()  # oldest first; None: cleared
    for step, hashes, namespace in steps:
        group = namespace[0]
        if step == "clear group":
            known.clear_group(group)
            groups = {each: None if of == group else of for each, of in groups.items()}
        elif step == "lost":
            known.lost(hashes[0])
            if groups.get(hashes[0]) is not None:
                stays = [*groups].index(hashes[0]) + 1
                groups = dict([*groups.items()][stays:])
        else:
            for each in hashes:
                groups.pop(each, None)
            if step == "add":
                known.add(hashes, namespace)
                groups |= dict.fromkeys([*dict.fromkeys(reversed(hashes))][::-1], group)
                groups = dict([*groups.items()][-capacity:])
            else:
                known.discard(hashes)
        assert [each in known for each in range(10)] == [groups.get(each) is not None for each in range(10)]
    known.clear()
    assert not any(each in known for each in range(10))
