"""Tests leave nothing on a machine but what pytest removes."""

from __future__ import annotations

import pytest
from support.preloaded_process import run_preloaded

from radixkv.model.model_cache import cache_folder


def test_what_is_made_of_models_is_among_the_tests_own_files(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Quantised weights of tiny models stayed in the user's model cache for ninety days, hundreds of megabytes of them."""
    folder = cache_folder()
    assert folder.is_relative_to(tmp_path_factory.getbasetemp())
    program = "from radixkv.model.model_cache import cache_folder; print(cache_folder())"
    assert run_preloaded(program).stdout == f"{folder}\n"
