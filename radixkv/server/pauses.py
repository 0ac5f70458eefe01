"""Does in advance what would pause all threads of a serving process."""

from __future__ import annotations

import gc
import logging

from radixkv.sampling.grammar.compiler import GrammarCompiler

_log = logging.getLogger(__name__)


def avoid_pauses(grammars: GrammarCompiler) -> None:
    """To be called when all that stays in memory has been loaded, before the process listens."""
    prepare_grammars(grammars)
    # Half a million objects stay alive: each garbage collection took 0.3 s to look through them.
    gc.collect()
    gc.freeze()


def prepare_grammars(grammars: GrammarCompiler) -> None:
    """See `GrammarCompiler.prepare`; where that cannot be done, a warning says so, and all other requests are served."""
    try:
        grammars.prepare()
    except Exception as error:  # a tokenizer may raise anything
        _log.warning("requests with structured output or tools that must be called will fail: %s", error)
