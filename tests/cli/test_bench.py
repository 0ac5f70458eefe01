"""`radixkv bench` where packages are missing."""

from __future__ import annotations

import pytest
from support.preloaded_process import COMMAND_LINE, run_preloaded


@pytest.mark.parametrize(
    ("name", "package", "extras"),
    [
        ("attacks", "httpx", "bench,server"),
        ("chaos", "httpx", "cluster"),
        ("cluster", "httpx", "cluster"),
        ("http-cost", "httpx", "bench,server"),
        ("plan", "triton", "gpu"),
        ("replica-memory", "httpx", "cluster"),
        ("serve", "httpx", "bench"),
        ("soak-server", "httpx", "bench,server"),
    ],
)
def test_a_bench_without_its_packages_says_which_extras_bring_them(name: str, package: str, extras: str) -> None:
    # Benches that other tests have imported are imported anew: otherwise they would not lack the package, and run.
    imported = "[name for name in sys.modules if name.startswith('radixkv')]"
    program = f"""
import sys
for name in {imported}:
    del sys.modules[name]
sys.modules[{package!r}] = None
{COMMAND_LINE}
"""
    result = run_preloaded(program, "bench", name)
    expected = f"radixkv: {package} is not installed: pip install 'radixkv[{extras}]'\n"
    assert (result.returncode, result.stderr) == (1, expected)
