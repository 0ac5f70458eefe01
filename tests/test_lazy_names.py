"""Packages whose names are imported at first use."""

from __future__ import annotations

import importlib
import sys

import pytest

import radixkv.cluster
from radixkv.errors import MissingPackageError


@pytest.mark.parametrize("package", ["radixkv", "radixkv.cluster", "radixkv.testing"])
def test_public_names_are_listed(package: str) -> None:
    """A shell completed none of them."""
    module = importlib.import_module(package)
    assert {*module.__all__, "__doc__"} <= {*dir(module)}


def test_what_a_name_needs_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("replica_set", "connection"):
        monkeypatch.delitem(sys.modules, f"radixkv.cluster.{module}", raising=False)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    advice = r"^ReplicaSet: aiohttp is not installed: pip install 'radixkv\[cluster\]'$"
    with pytest.raises(MissingPackageError, match=advice):
        _ = radixkv.cluster.ReplicaSet
