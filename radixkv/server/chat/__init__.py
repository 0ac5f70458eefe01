"""Chat completions, and what other protocols share with them by being translated into chat requests.

::

    routes.py               `POST /v1/chat/completions`
      request.py            its body; messages.py, tool_protocol.py, prompt_caching.py: parts of it
      events.py             the answers as events, which each protocol writes in its own form
      answer_tokens.py      which tokens are an answer's text, which its reasoning
      prefix_keeper.py      prefixes that a request asked to keep
    translated_chat.py      requests of other protocols; turns.py: their messages
"""
