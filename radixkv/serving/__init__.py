"""One engine for many callers: the thread that owns it, and its requests as streams of an asyncio program.

::

    event loop                                        the engine's thread
    RequestIntake: refuse or prepare   -- requests -->  EngineThread: add, step, abort
    RequestStream: outputs one by one  <-- updates --   outputs of what a step touched

    async_engine.py         both, for a program
      request_intake.py     fair_thread.py: tokenizing for all tenants in turns; early_aborts.py: of what is prepared
      request_stream.py
      engine_thread.py
    without an event loop:
      exclusive_use.py      an engine used by several threads; interrupts.py: Ctrl-C between its steps
    conversation.py         what chats keep
    answer_reader.py        answers, split into text, reasoning and calls
"""
