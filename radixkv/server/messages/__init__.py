"""Anthropic's Messages API over the same engine: its content blocks, its events, its errors, and its cache control.

::

    routes.py               request.py, blocks.py: what comes; objects.py, errors.py: what goes
    translation.py          requests as chat completions, and where they ask for a prefix to stay cached
    output.py, writer.py    an answer's pieces as content blocks and their events; a message, whole or as events
"""
