"""Requests and their sequences, the waiting queue, and which of their tokens go into the next batch.

::

    request.py              requests, sequences, and the groups that are scheduled as one; batch.py: what one step computes
    sequence_blocks.py      their block tables, as they run
    scheduler.py            the next batch: decoding sequences first, prompts in what is left
      admission.py          which waiting groups start; waiting_queue.py: in which order
      decode_growth.py      how many blocks must stay free for those that run
      in_flight_prefixes.py which groups wait for a prefix that a running group computes
      branch_points.py      where states are kept inside blocks, for prompts that part there
      logit_rows.py         how many rows of logits a step may have
    shares of tenants:
      tenant_share.py       what one may have
      fair_shares.py        whose turn it is; tenant_usage.py: which has most; prompt_shares.py: whose prompts delay others
      tenant_waits.py       those of which nothing can start, as all of it waits for prefixes
    prefixes from tiers (only where there are tiers):
      prefix_loads.py       groups that wait for one
      prefix_look_ups.py    what tiers have of it; waiting_prefix.py: what is known of it so far
      active_loads.py       loads that hold blocks; load_claims.py: so that none evicts another's
    before a request is accepted:
      request_validation.py, queue_slots.py
"""
