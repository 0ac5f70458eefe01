"""How far a tenant that wants more than its share may lengthen the steps in which others wait for a first token.

All requests of a step wait for its end: a tenant with a hundred requests fills it with prompts up to the budget, and another
tenant's short prompt beside them waits for all of these. So where both compute prompts, the first tenant's get at most its
share, by weight, of as many tokens as the others have, or a small part of the budget if that is more; the rest is computed in
the steps that follow::

    |  decoding  |  other tenants' prompts  |  prompts of one over its share            |  left to later steps
                 |<---------- n ----------->|<----- n * its weight / all weights ------>|

So the prompts of a step take less than twice as long as those of the others alone. Where no other tenant computes a prompt,
nothing is left to later steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from radixkv.scheduling.batch import ScheduledChunk
from radixkv.scheduling.fair_shares import FairShares


def bound_prompts(
    chunks: list[ScheduledChunk], wanting_more: Collection[str], shares: FairShares, min_tokens: int
) -> list[ScheduledChunk]:
    """The prompt chunks of a step, without what would lengthen it too much.

    Args:
        chunks: in the order in which they were scheduled.
        wanting_more: tenants that want more sequences than their share.
        min_tokens: that each of them may compute in any case.
    """
    num_tokens: Counter[str] = Counter()
    for chunk in chunks:
        num_tokens[chunk.group.request.tenant] += chunk.num_tokens
    others = [tenant for tenant in num_tokens if tenant not in wanting_more]
    if not others or len(others) == len(num_tokens):
        return chunks
    num_others = sum(num_tokens[tenant] for tenant in others)
    total_weight = shares.total_weight(num_tokens)
    left = {
        tenant: max(min_tokens, shares.apportion(tenant, num_others, total_weight))
        for tenant in num_tokens
        if tenant in wanting_more
    }
    bounded = []
    for chunk in chunks:
        tenant = chunk.group.request.tenant
        if tenant in left:
            # A single token is all or nothing for the samples of a group, and costs next to nothing.
            chunk = chunk.first(max(left[tenant], int(chunk.num_tokens == 1)))
            left[tenant] -= chunk.num_tokens
        if chunk.num_tokens:
            bounded.append(chunk)
    return bounded
