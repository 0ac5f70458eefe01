"""How long a test waits at most."""

from __future__ import annotations

# Seconds after which something counts as hanging, however busy the machine.
HANGING = 600
