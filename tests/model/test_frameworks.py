"""Importing torch and transformers is not interrupted by the garbage collector, which afterwards works as before."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest
import torch  # noqa: F401

from radixkv.model.frameworks import import_frameworks

PROGRAM = """
import gc, os, sys
collections, spin_count = [], os.environ.get("GOMP_SPINCOUNT")

def record(phase, info):
    if phase == "start" and "torch" in sys.modules and not gc.get_freeze_count():
        collections.append(info["generation"])

gc.callbacks.append(record)
exec(sys.argv[1])
assert "transformers.modeling_utils" in sys.modules
assert collections == [], collections
assert gc.isenabled()
assert gc.get_freeze_count() > 100_000
assert os.environ.get("GOMP_SPINCOUNT") == spin_count
"""


def run(first: str, **environment: str) -> str:
    """What a process says on standard error that imports this first, and nothing that OpenMP is told but what is given."""
    kept = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    command = [sys.executable, "-c", PROGRAM, first]
    ended = subprocess.run(command, env={**kept, **environment}, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stderr


# A process takes seconds to import all this, so each of the three that begin in another way is looked at for everything.
def test_nothing_is_collected_while_they_are_imported_and_no_leaks_are_reported_at_the_end() -> None:
    """Of Triton's extension modules, some thousand lines: its types were exempt from the interpreter's last collection."""
    assert run("from radixkv import LLM; import triton._C.libtriton") == ""


@pytest.mark.parametrize(
    ("first", "given", "expected"),
    [
        ("from radixkv import AsyncLLM", {}, "1000"),
        ("import radixkv.cluster.replica_routes", {"GOMP_SPINCOUNT": "77"}, "77"),
    ],
)
def test_threads_of_a_step_wait_for_each_other_asleep_soon_and_nothing_is_collected(
    first: str, given: dict[str, str], expected: str
) -> None:
    """Unless the environment says for how long; and what the process starts later finds the environment as it was.

    Whatever is imported first: a server's engine began with the interface of `AsyncLLM`, and torch before all this.
    """
    assert f"GOMP_SPINCOUNT = '{expected}'" in run(first, OMP_DISPLAY_ENV="VERBOSE", **given)


def test_a_program_that_has_imported_torch_keeps_its_garbage_collection() -> None:
    frozen = gc.get_freeze_count()
    import_frameworks()
    assert gc.get_freeze_count() == frozen
