"""Prefix groups against their definition."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from radixkv.attention.prefix_groups import prefix_groups
from radixkv.attention.triton.cost_model import min_shared_tokens


def sharing_pays(num_sequences: int, num_tokens: int, group: int) -> bool:
    """Bytes of keys and values that need not be read again, for one head of dim 1, against those of partial results."""
    return (num_sequences - 1) * num_tokens * 2 * 2 > 2 * num_sequences * group * 4


def groups_anew(common: list[int], group: int, start: int, stop: int, depth: int) -> list[tuple[int, int, int, int]]:
    """The groups over the sequences ``start .. stop``, written down as they are defined; blocks of 16."""
    if stop - start < 2:
        return []
    between = common[start : stop - 1]
    shared, groups = min(between) * 16, []
    if sharing_pays(stop - start, shared - depth, group):
        groups, depth = [(start, stop, depth, shared)], shared
    borders = [start, *(start + i + 1 for i, blocks in enumerate(between) if blocks * 16 == shared), stop]
    below = [groups_anew(common, group, a, b, depth) for a, b in itertools.pairwise(borders)]
    return [*groups, *itertools.chain(*below)]


@given(common=st.lists(st.integers(0, 5), max_size=30), group=st.integers(1, 20))
def test_prefix_groups_are_the_nodes_of_the_tree(common: list[int], group: int) -> None:
    found = prefix_groups(common, 16, [0, 0, *(min_shared_tokens(count, group, 2) for count in range(2, 32))])
    groups = [tuple(group) for group in found.ranges.T.tolist()]
    assert sorted(groups) == sorted(groups_anew(common, group, 0, len(common) + 1, 0))
    reach = [0] * (len(common) + 1)
    for start, stop, key_start, key_stop in groups:  # parents first: each goes on where the one above it ended
        assert reach[start:stop] == [key_start] * (stop - start)
        reach[start:stop] = [key_stop] * (stop - start)
    assert found.private_from.tolist() == reach
    assert found.saved_tokens == sum(
        (stop - start - 1) * (key_stop - key_start) for start, stop, key_start, key_stop in groups
    )
