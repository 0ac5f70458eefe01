"""A disk's store of blocks: one folder, slots of one size in large files, and an index of them.

::

    store_folder.py         the folder: its files, its lock, its permissions; mount.py: where it may be gone for a while
    open_store.py           a store while a process has it open
      store_writer.py       the one process that writes it; store_reader.py: others
      slot_table.py         which slot holds which block, in memory; slot_index.py: in SQLite
      slot_files.py         the slots' bytes; open_files.py, slot_reader.py
    compaction.py, maintenance.py, other_stores.py                        made smaller, verified, cleared
    namespace_secret.py, stored_pins.py                                   what else is stored on a disk
"""
