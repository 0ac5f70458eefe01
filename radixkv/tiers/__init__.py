"""Tiers, where blocks are kept outside the pool: their interface, common parts, and the stores that come with RadixKV.

::

    tier.py                 the interface, which other stores can implement
      stack.py              several tiers as one
      host_tier.py          host memory
      disk_tier.py          a disk of this machine
        store_folder.py     one store's folder; store_writer.py: the process that writes it; store_reader.py: others
        slot_table.py, slot_index.py, slot_files.py, slot_reader.py       which slot holds which block, and its bytes
        compaction.py, maintenance.py, other_stores.py                    made smaller, verified, cleared
      shared_tier.py        a store for several machines: folder_blobs.py, redis_blobs.py; medium_queue.py, backoff.py
    block_key.py, block_format.py, record.py, encryption.py               names and bytes of a block outside the pool
    block_moves.py          which blocks go down, and when; wanted_prefixes.py, known_blocks.py; hot_prefixes.py: at the end;
      writer.py             in the background
    loader.py, load.py      how prefixes come up; prefix_search.py; rates.py: whether that is faster than computing them
    namespace_secret.py, stored_pins.py                                   what else a disk remembers
"""
