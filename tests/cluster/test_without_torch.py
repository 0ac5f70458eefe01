"""An ingress computes nothing: what it imports of RadixKV does without torch, and so does its process."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
from importlib.util import find_spec
from radixkv.model.without_torch import call_with_torch, forgo_torch

if __name__ == "__main__":
    assert call_with_torch(find_spec, "torch") is not None
    forgo_torch()
    assert find_spec("torch") is None
    assert call_with_torch(find_spec, "torch") is not None
    try:
        call_with_torch(int, "planted")
    except ValueError as error:
        print(error)
"""


def test_the_modules_of_an_ingress_import_no_torch() -> None:
    modules = "radixkv.cluster.run, radixkv.cluster.ingress"
    subprocess.run([sys.executable, "-c", f"import sys, {modules}; assert 'torch' not in sys.modules"], check=True)


def test_what_needs_torch_runs_in_a_process_that_has_it() -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert "planted" in result.stdout
