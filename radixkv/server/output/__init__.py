"""How answers are written, whatever their protocol.

::

    respond.py              one response: in full or as events, while its prompts run
      event_stream.py       server-sent events
    encoding.py             JSON, large parts of it written by a thread
    logprobs.py             log-probabilities; token_text.py: texts of single tokens
    response_size.py        how much a response may take in memory
"""
