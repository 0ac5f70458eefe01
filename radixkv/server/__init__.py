"""The OpenAI-compatible HTTP server: `radixkv serve`.

::

    run.py, config.py       the process: socket, signals, exit status; its options
      app.py                all routes
        chat_completions.py, completions.py, tokenization.py, models.py, metrics.py, admin.py
          service.py        what the routes share
          protocol.py       fields that both kinds of completions have; response_format.py, chat_messages.py
          generation.py     a request's streams, from admission to the last token
          tenants.py        keys, and the namespaces that they stand for
          errors.py         every refusal in OpenAI's shape
"""
