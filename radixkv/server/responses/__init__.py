"""OpenAI's Responses API over the same engine: its items, its events, and a bounded memory of earlier responses.

::

    routes.py               request.py, items.py: what comes; objects.py, events.py: what goes
    input_items.py          a conversation's items, in pages
    translation.py          requests and items as chat completions; references.py: items of stored responses, by their ids
    output.py, writer.py    an answer's pieces as items and their events; a response, whole or as events
    store.py                finished responses, so that a request can continue one
"""
