"""The OpenAI-compatible HTTP server: `radixkv serve`.

::

    run.py, config.py       the process: signals, exit status; its options
      listener.py           its sockets; watchdog.py: a time limit of the engine's steps
      connection.py         time limits of clients; open_connections.py: what all of them together may take
      app.py                all routes, and what every request passes first, from the outside in:
        request_log.py      a name for each, and a line in the log
        authentication.py   who sent it, before its body is read
        body_limit.py       how long that may be, and how hard to read
      chat_completions.py, completions.py, tokenization.py, models.py, metrics.py, admin.py
        service.py          state that all routes share
        protocol.py         request fields common to both completion endpoints; response_format.py, chat_messages.py
        chat_events.py      a chat request's answers as events, which endpoints write in their own forms; chat_request.py
        responses/, messages/   other protocols, translated into chat requests: translated_chat.py, turns.py
        generation.py       a request's streams, from admission to the last token; time_limits.py: how long that may take
        tenants.py          API keys, and the cache namespaces derived from them
        errors.py           every error in its client's format; validation_errors.py: what is wrong with a request, in words
"""
