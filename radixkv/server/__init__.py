"""The OpenAI-compatible HTTP server: `radixkv serve`.

::

    run.py, config.py       the process: socket, signals, exit status; its options
      app.py                all routes
        chat_completions.py, completions.py, tokenization.py, models.py, metrics.py, admin.py
          service.py        state that all routes share
          protocol.py       request fields common to both completion endpoints; response_format.py, chat_messages.py
          generation.py     a request's streams, from admission to the last token
          tenants.py        API keys, and the cache namespaces derived from them
          errors.py         every error in OpenAI's format
"""
