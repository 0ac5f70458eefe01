"""Names of blocks."""

from __future__ import annotations

import copy
import pickle

from support.tier_model import prefix_keys


def test_a_key_is_sent_and_copied_without_those_before_it() -> None:
    """Of a long prefix, pickle did not come to an end of them, and a store that sends keys elsewhere failed."""
    key = prefix_keys("", *range(5000))[-1]
    for other in (pickle.loads(pickle.dumps(key)), copy.deepcopy(key)):
        assert other == key
        assert other.parent is None
