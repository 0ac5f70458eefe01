"""One engine for many callers: the thread that owns it, and its requests as streams of an asyncio program.

::

    event loop                                        the engine's thread
    RequestIntake: refuse or prepare   -- requests -->  EngineThread: add, step, abort
    RequestStream: outputs one by one  <-- updates --   outputs of what a step touched
"""
