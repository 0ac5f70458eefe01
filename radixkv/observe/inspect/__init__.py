"""Inspection of a cache.

::

    snapshot.py             what is in it, as data and JSON; replica_snapshots.py: in those of several replicas
    source.py               snapshots, from files and servers
    terminal.py             drawn in a terminal: tree_view.py
    picture.py              drawn as SVG
    visible_text.py         texts that can be shown
"""
