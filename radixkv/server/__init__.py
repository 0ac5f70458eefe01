"""The OpenAI-compatible HTTP server: `radixkv serve`.

::

    run.py              the process: uvicorn, signals, exit code
      app.py            all routes, and what they share
        completions.py, chat_completions.py, tokenization.py, models.py, health.py, admin.py, metrics.py
          generation.py a request's streams, from admission to the last token
"""
