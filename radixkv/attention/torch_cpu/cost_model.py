"""When sharing, viewing and gathering pay with torch on a CPU, with the measurements behind it.

Measured on two cores with the shapes of SmolLM2-135M (9 query and 3 key-value heads of 64, float32), in microseconds:

====================================  =============  ======================  ====================
16 sequences, one query row each      one call each  gathered into one call  one call, shared run
====================================  =============  ======================  ====================
64 tokens each                        276            134                     34
300 tokens each                       744            532                     100
1,000 tokens each                     2,107          2,040                   278
====================================  =============  ======================  ====================
"""

from __future__ import annotations

# A shared prefix saves reading (sequences - 1) x tokens; its own call and the merge of its result cost about 50 us, the
# time in which a decoding row reads some 500 tokens.
SHARING_COST_TOKENS = 512

# A call of its own over a view of the pool costs about 15 us more than the same rows inside a gathered batch; copying
# a token into the batch costs about 0.1 us, so from here on the copy is dearer than the call.
MIN_VIEW_TOKENS = 512

# Sequences are gathered into one batch while the shortest fills this share of the longest: the rest is padding.
MIN_BATCH_FILL = 0.7


def view_pays(num_runs: int, num_tokens: int) -> bool:
    """Whether ``num_tokens`` that lie in ``num_runs`` runs of consecutive blocks should be attended in place."""
    return num_tokens >= MIN_VIEW_TOKENS * num_runs
