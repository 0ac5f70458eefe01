"""Prefix groups against their definition."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from radixkv.attention import SharingRule
from radixkv.attention.prefix_groups import prefix_groups


def sharing_pays(rows: list[int], num_tokens: int, group: int, tile: int) -> bool:
    """Bytes of keys and values that are not read again, for one head of dim 1, against the bytes of partial results."""
    alone, together = sum(-(-count // tile) for count in rows), -(-sum(rows) // tile)
    return (alone - together) * num_tokens * 2 * 2 > 2 * sum(rows) * group * 4


def groups_anew(
    common: list[int], rows: list[int], group: int, levels: int, start: int, stop: int, depth: int
) -> list[tuple[int, int, int, int]]:
    """The groups over the sequences ``start .. stop``, computed by their definition; blocks of 16, tiles of 8 rows."""
    if stop - start < 2:
        return []
    between = common[start : stop - 1]
    shared, groups = min(between) * 16, []
    if levels and sharing_pays(rows[start:stop], shared - depth, group, 8):
        groups, depth, levels = [(start, stop, depth, shared)], shared, levels - 1
    borders = [start, *(start + i + 1 for i, blocks in enumerate(between) if blocks * 16 == shared), stop]
    below = [groups_anew(common, rows, group, levels, a, b, depth) for a, b in itertools.pairwise(borders)]
    return [*groups, *itertools.chain(*below)]


@given(
    common=st.lists(st.integers(0, 5), max_size=30) | st.lists(st.integers(3, 5), min_size=8, max_size=30),
    num_new=st.lists(st.sampled_from([1, 3, 20]), min_size=31, max_size=31) | st.just([1] * 31),
    group=st.integers(1, 20),
    max_levels=st.integers(0, 3),
)
def test_prefix_groups_are_the_nodes_of_the_tree(
    common: list[int], num_new: list[int], group: int, max_levels: int
) -> None:
    rows = num_new[: len(common) + 1]
    rule = SharingRule(cost_per_row=4 * group / 2, rows_per_reading=8, max_levels=max_levels)
    found = prefix_groups(common, rows, 16, rule)
    groups = [tuple(group) for group in found.ranges.T.tolist()]
    assert sorted(groups) == sorted(groups_anew(common, rows, group, max_levels, 0, len(common) + 1, 0))
    reach = [0] * (len(common) + 1)
    saved = 0
    for start, stop, key_start, key_stop in groups:  # parents first: each group starts where the one above it ends
        assert reach[start:stop] == [key_start] * (stop - start)
        reach[start:stop] = [key_stop] * (stop - start)
        alone, together = sum(-(-count // 8) for count in rows[start:stop]), -(-sum(rows[start:stop]) // 8)
        saved += (alone - together) * (key_stop - key_start)
    assert found.private_from.tolist() == reach
    assert found.saved_tokens == saved
