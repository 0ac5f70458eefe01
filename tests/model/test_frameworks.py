"""Importing torch and transformers is not interrupted by the garbage collector, which afterwards works as before."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys

import pytest
import torch  # noqa: F401

from radixkv.model.frameworks import import_frameworks

IMPORTS_ALL = """
import gc, os, sys
collections, spin_count = [], os.environ.get("GOMP_SPINCOUNT")

def record(phase, info):
    if phase == "start" and "torch" in sys.modules and not gc.get_freeze_count():
        collections.append(info["generation"])

gc.callbacks.append(record)
from radixkv import LLM
import triton._C.libtriton
assert "transformers.modeling_utils" in sys.modules
assert collections == [], collections
assert gc.isenabled()
assert gc.get_freeze_count() > 100_000
assert os.environ.get("GOMP_SPINCOUNT") == spin_count
"""
# Ends where torch would be imported, and prints what that would find.
UP_TO_TORCH = """
import gc, os, sys

class Finder:
    def find_spec(self, name, *_):
        if name == "torch":
            print(gc.isenabled(), os.environ.get("GOMP_SPINCOUNT"), "transformers" in sys.modules, flush=True)
            os._exit(0)

sys.meta_path.insert(0, Finder())
exec(sys.argv[1])
"""


def run(*program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program whose environment has no settings of OpenMP but the given ones."""
    kept = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    command = [sys.executable, "-c", *program]
    ended = subprocess.run(command, env={**kept, **environment}, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended


def test_nothing_is_collected_while_they_are_imported_and_no_leaks_are_reported_at_the_end() -> None:
    """Of Triton's extension modules, some thousand lines: its types were exempt from the interpreter's last collection.

    And threads of a step wait for each other asleep soon; what the process starts later finds the environment as it was.
    """
    said = run(IMPORTS_ALL, OMP_DISPLAY_ENV="VERBOSE").stderr
    settings = re.compile(r"\nOPENMP DISPLAY ENVIRONMENT BEGIN\n.*?OPENMP DISPLAY ENVIRONMENT END\n", re.DOTALL)
    assert "GOMP_SPINCOUNT = '1000'" in said
    assert settings.sub("", said) == ""


@pytest.mark.parametrize(
    ("first", "given", "expected"),
    [
        ("from radixkv import LLM", {"OMP_WAIT_POLICY": "active"}, "None"),
        ("from radixkv import AsyncLLM", {}, "1000"),
        ("import radixkv.cluster.replica_routes", {"GOMP_SPINCOUNT": "77"}, "77"),
    ],
)
def test_what_is_imported_first_imports_torch_as_the_others_do(
    first: str, given: dict[str, str], expected: str
) -> None:
    """A server's engine began with the interface of `AsyncLLM`, and torch before all this.

    Unless the environment says how threads wait.
    """
    assert run(UP_TO_TORCH, first, **given).stdout == f"False {expected} False\n"


def test_a_program_that_has_imported_torch_keeps_its_garbage_collection() -> None:
    frozen = gc.get_freeze_count()
    import_frameworks()
    assert gc.get_freeze_count() == frozen
