"""The parts of a first light, the most important first: is it correct, how fast is it, what should be set.

Of 30 minutes, those about correctness take 19 at most, so that something is learned about speed in any case.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import radixkv
from radixkv.bench.gpu.first_light import Part

_TESTS = Path(radixkv.__file__).parents[1] / "tests"
# Where CUDA's tools are when they are not on the path.
_CUDA_TOOLS = "/usr/local/cuda/bin"
# Not run under the memory checker: capturing graphs needs torch's caching allocator, and real sizes would take forever.
_NOT_CHECKED = "not captured and not real_sizes"
# Runs alone, because it looks at the memory of the whole GPU, which other tests would use at the same time.
_ALONE = "test_the_pool_takes_what_memory_is_left"
# Tests spend their time compiling kernels, each on one core; this many processes fit into the GPU's memory easily.
_MAX_WORKERS = 12


def first_light_parts() -> list[Part]:
    """All parts, as they can be run here."""
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=_CUDA_TOOLS)
    return [
        Part(
            "ready", 120, [sys.executable, "-m", "radixkv.bench.gpu.ready"], needed=True,
            advice="no CUDA build of torch, driver, package or C compiler: its last lines say which; see docs/gpu.md",
        ),
        Part(
            "limits", 90, [*_radixkv("bench", "limits"), "--json", "{json}"], needed=True,
            advice="the GPU runs a kernel, but does not copy or multiply: see its last lines",
        ),
        Part(
            "memory-checked-kernels", 180,
            # Libraries probe for what a driver lacks; such calls, reported as errors, would end every run with 77.
            [sanitizer or "", "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "77",
             *_pytest("kernels/test_on_gpu.py", "-x", "-p", "no:xdist", "-k", _NOT_CHECKED)],
            # Makes each tensor an allocation of its own, whose end the checker knows.
            environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            missing=_tests_missing() or ("" if sanitizer else "there is no compute-sanitizer here"),
            advice="exit status 77: a kernel reads or writes out of bounds; before all else, see which in its last lines",
        ),
        _tests("bfloat16-model", 300, "engine/test_bfloat16_on_gpu.py", *_workers()),
        _tests("kernel-tests", 220, "kernels/test_on_gpu.py", *_workers()),
        _tests("engine-tests", 230, "engine/test_on_gpu.py", *_workers(), "-k", f"not {_ALONE}"),
        _tests("pool-test", 60, "engine/test_on_gpu.py", "-p", "no:xdist", "-k", _ALONE),
        _bench("attention", 480, "attention"),
        _bench("decode-default", 480, "decode", "default: "),
        _bench("decode-neither", 420, "decode", "neither: "),
        _bench("decode-host-tier", 240, "decode", "host tier: "),
        _bench("tiles-sharing", 240, "tiles", "sharing"),
        _bench("tiles-classes", 120, "tiles", "tile classes"),
        _bench("tiles-splitting", 240, "tiles", "splitting"),
        *(_bench(f"tiles-{rows}", 480, "tiles", f"{rows} rows") for rows in (16, 64, 128)),
        _bench("decode-drafts", 300, "decode", "drafts: "),
        _bench("decode-transformers", 480, "decode", "transformers: "),
        _bench("decode-not-compiled", 420, "decode", "not compiled: "),
        _bench("decode-not-merged", 480, "decode", "not merged: "),
        _bench("decode-rotated-apart", 420, "decode", "rotated apart: "),
    ]  # fmt: skip


def _tests(name: str, seconds: float, path: str, *arguments: str) -> Part:
    return Part(
        name, seconds, _pytest(path, *arguments), missing=_tests_missing(),
        environment={"OMP_NUM_THREADS": "1"},
        advice=f"correct before fast: run tests/{path} alone, with enforce_eager first, and CUDA_LAUNCH_BLOCKING=1",
    )  # fmt: skip


def _bench(name: str, seconds: float, command: str, only: str | None = None) -> Part:
    chosen = [] if only is None else ["--only", only]
    return Part(
        name, seconds, [*_radixkv("bench", command), "--resume", *chosen, "--json", "{json}"],
        advice="see its last lines; its rows up to there are kept",
    )  # fmt: skip


def _radixkv(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "radixkv", *arguments]


def _pytest(path: str, *arguments: str) -> list[str]:
    # After an illegal access all later tests of a process fail, and would push the first one out of the lines that are kept.
    options = ["-m", "gpu", "--tb=short", "--maxfail=8", "--durations=5", "-p", "no:cacheprovider"]
    return [sys.executable, "-m", "pytest", *options, *arguments, str(_TESTS / path)]


def _workers() -> list[str]:
    """Options for a worker per core, up to `_MAX_WORKERS`, where pytest-xdist is there: 70 tests took 76 s with 14 cores."""
    count = min(_MAX_WORKERS, os.cpu_count() or 1)
    return ["-n", str(count), "--dist", "worksteal"] if count > 1 and importlib.util.find_spec("xdist") else []


def _tests_missing() -> str:
    if not _TESTS.is_dir():
        return "there are no tests here: run it from a checkout"
    missing = [package for package in ("pytest", "hypothesis") if not importlib.util.find_spec(package)]
    return f"{' and '.join(missing)} must be installed" if missing else ""
