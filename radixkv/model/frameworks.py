"""Imports torch and transformers when it is imported, while the garbage collector rests.

They make hundreds of thousands of objects, which stay. The collector would look through all of them several times while they
are being made, and again whenever it looks through everything later.
"""

from __future__ import annotations

import atexit
import gc
import sys


def import_frameworks() -> None:
    """Import both, and exempt from collection what there is then (`gc.freeze`).

    Does nothing where torch has been imported before: among the objects of such a program may be models, which are to be
    collected one day.
    """
    if "torch" in sys.modules:
        return
    was_enabled = gc.isenabled()
    gc.collect()  # what is garbage now would be exempt, too
    gc.disable()
    try:
        import torch  # noqa: F401
        import transformers.modeling_utils  # noqa: F401

        gc.freeze()
        atexit.register(gc.unfreeze)  # extension modules report types that outlive the interpreter as leaks
    finally:
        if was_enabled:
            gc.enable()


import_frameworks()
