"""The step loop: schedule, execute, process; and what it drives.

::

    engine.py               accepts requests, and runs them step by step
      request_factory.py    makes and validates them; begin_request.py: their first sequences
        resumption.py       at a later token; resume_checks.py: whether that can be
      unfinished_requests.py
      executor.py           runs the model, and samples where the host is not needed; compute_timer.py
      speculation.py        which drafts are verified in a step
      output_processor.py   each sequence's tokens: it continues, forks or ends; sampled_token.py, request_output.py
    what is made when an engine starts:
      needed_packages.py    those of extras, imported before a model is loaded
      recurrent_options.py  what recurrent layers rule out
      pool_setup.py         the pool of keys and values
      open_cache.py         the cache, and its events
      open_tiers.py         the tiers below the pool, which are kv_tiers.py; block_fingerprint.py: whose blocks they may hold
      speculator_setup.py
    beside the steps:
      named_pins.py, tenant_pins.py, clearing.py, explain_prompts.py, stats.py, trace_recorder.py

The way of a step through them: docs/architecture/step.md.
"""
