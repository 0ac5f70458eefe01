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
import gc, sys
collections = []

def record(phase, info):
    if phase == "start" and "torch" in sys.modules and not gc.get_freeze_count():
        collections.append(info["generation"])

gc.callbacks.append(record)
exec(sys.argv[1])
assert "transformers.modeling_utils" in sys.modules
assert collections == [], collections
assert gc.isenabled()
assert gc.get_freeze_count() > 100_000
"""


@pytest.mark.parametrize(
    "first", ["from radixkv import LLM", "from radixkv import AsyncLLM", "import radixkv.cluster.replica_routes"]
)
def test_nothing_is_collected_while_they_are_imported(first: str) -> None:
    """Whatever is imported first: a server's engine began with the interface of `AsyncLLM`, and torch before all this."""
    subprocess.run([sys.executable, "-c", PROGRAM, first], check=True)


def test_extension_modules_report_no_leaks_when_the_process_ends() -> None:
    """Of Triton's, some thousand lines: its types were exempt from the interpreter's last collection."""
    program = "from radixkv import LLM; import triton._C.libtriton"
    ended = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert ended.stderr == ""


def test_a_program_that_has_imported_torch_keeps_its_garbage_collection() -> None:
    frozen = gc.get_freeze_count()
    import_frameworks()
    assert gc.get_freeze_count() == frozen


@pytest.mark.parametrize(("given", "expected"), [({}, "1000"), ({"GOMP_SPINCOUNT": "77"}, "77")])
def test_threads_of_a_step_wait_for_each_other_asleep_soon(given: dict[str, str], expected: str) -> None:
    """Unless the environment says for how long; and what the process starts later finds the environment as it was."""
    left = given.get("GOMP_SPINCOUNT")
    program = f"import os; from radixkv import LLM; assert os.environ.get('GOMP_SPINCOUNT') == {left!r}"
    environment = {
        name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    told = subprocess.run(
        [sys.executable, "-c", program],
        env={**environment, "OMP_DISPLAY_ENV": "VERBOSE", **given},
        check=True,
        capture_output=True,
        text=True,
    )
    assert f"GOMP_SPINCOUNT = '{expected}'" in told.stderr
