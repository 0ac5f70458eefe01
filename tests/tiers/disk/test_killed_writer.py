"""A process that writes is killed at random moments: the folder opens, and every block that is hit is right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support import killed_writer


@pytest.mark.parametrize(
    ("kills", "least_hits"), [(15, 200), pytest.param(250, 10_000, marks=pytest.mark.nightly)], ids=["15", "250"]
)
def test_what_a_killed_process_left_is_right(tmp_path: Path, kills: int, least_hits: int) -> None:
    for seed in range(10):
        print("seed", seed)
        ended = subprocess.run(
            [sys.executable, killed_writer.__file__, tmp_path, str(kills), str(seed)],
            check=False,
            capture_output=True,
            text=True,
        )
        assert not ended.returncode, ended.stderr
        least_hits -= int(ended.stdout)
        if least_hits <= 0:
            return
    pytest.fail(f"{least_hits} hits too few")
