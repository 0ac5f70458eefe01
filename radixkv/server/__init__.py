"""The OpenAI-compatible HTTP server: `radixkv serve`.

::

    run.py, config.py       the process: signals, exit status; its options
      transport/            sockets, connections, TLS
      watchdog.py           a time limit of the engine's steps; pauses.py: what would pause all threads; reload.py: SIGHUP
    app.py                  all routes, and what every request passes first:
      middleware/           request_log.py: an id for each, and a line in the log; body_limit.py: how long its body may be
      access/               authentication.py: who sent it, before its body is read; keys, tenants, rate limits
    chat/                   chat completions
      responses/, messages/ other protocols, translated into chat requests
    completions.py, tokenization.py, api_description.py
    operation/              what operators see and steer: metrics, the page, health, pins, administration
    requests' fields:
      strict.py, unions.py  the base of all of them
      protocol.py           what both completion endpoints have in common; response_format.py, not_supported.py
      errors.py             every error in OpenAI's format; validation_errors.py: what is wrong with a request, in words
    service.py              state that all routes share; served_model.py: what the server needs of a model
      generation.py         a request's streams, from admission to the last token; time_limits.py: how long that may take
      output/               answers as JSON and as events
"""
