"""How blocks move between the pool and the tiers below it, beside the steps of an engine.

::

    block_moves.py          which blocks go down, and when; wanted_prefixes.py, known_blocks.py; hot_prefixes.py: at the end
      writer.py             in the background
    loader.py, load.py      how prefixes come up
      prefix_search.py      how much of one there is; rates.py: whether loading is faster than computing
    prefix_keys.py, pool_rows.py                                          names and bytes of what moves
"""
