"""Decoding with drafts and without: tokens a second, and whether the tokens are the same.

::

    work.py                 the kinds of work: said before, rewritten, by a grammar, new
    speed.py, equality.py   tokens a second; where answers differ
    peers.py                drafts of transformers and vLLM
    report.py               as a table and as a plot
"""
