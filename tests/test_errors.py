"""Errors are passed between processes, and copied, with all that they say."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable

import pytest

from radixkv import errors
from radixkv.testing import RuleViolation

KINDS: list[type[Exception]] = [*(getattr(errors, name) for name in errors.__all__), RuleViolation]
OF_A_KIND = {"str": "a message", "int": 3, "bool": True, "Sequence[str]": ["A opens", "A closes"]}


def error_of(kind: type[Exception]) -> Exception:
    if not inspect.isfunction(kind.__init__):  # Python's own
        return kind("a message")
    _, *parameters = inspect.signature(kind.__init__).parameters.values()
    return kind(*(OF_A_KIND[parameter.annotation] for parameter in parameters))


def pickled(error: Exception) -> Exception:
    again: Exception = pickle.loads(pickle.dumps(error))
    return again


@pytest.mark.parametrize("again", [pickled, copy.copy, copy.deepcopy])
@pytest.mark.parametrize("kind", KINDS)
def test_an_error_is_the_same_after_a_pickle_and_a_copy(
    kind: type[Exception], again: Callable[[Exception], Exception]
) -> None:
    """A pool of processes used to wait for ever: it could not rebuild the error from its message alone."""
    error = error_of(kind)
    error.add_note("of 2 prompts, prompts[1]")
    same = again(error)
    assert type(same) is kind
    assert str(same) == str(error)
    assert vars(same) == vars(error)


def test_every_error_is_exported() -> None:
    defined = {name for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, Exception)}
    assert defined == set(errors.__all__)
