"""Ray reads its environment when it is imported, which is by whichever of these modules is collected first."""

from __future__ import annotations

import os

from radixkv.ray import local

local._set_environment(os.environ)
