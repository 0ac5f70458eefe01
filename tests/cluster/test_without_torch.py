"""An ingress computes nothing: what it imports of RadixKV does without torch."""

from __future__ import annotations

import subprocess
import sys


def test_the_modules_of_an_ingress_import_no_torch() -> None:
    modules = "radixkv.cluster.run, radixkv.cluster.ingress, radixkv.ray.membership"
    subprocess.run([sys.executable, "-c", f"import sys, {modules}; assert 'torch' not in sys.modules"], check=True)
