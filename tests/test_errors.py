"""Errors are passed between processes, and copied, with all that they say."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable

import pytest

from radixkv import errors
from radixkv.cache.errors import OutOfBlocks, PinQuotaExceeded
from radixkv.observe.prompt_explanation import TierPart
from radixkv.scheduling.queue_slots import QueueSlots
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


def test_one_thing_is_not_written_as_several() -> None:
    slots = QueueSlots({})
    slots.take("", 1)
    messages = {
        str(OutOfBlocks(1, 0, 0)): "1 block needed, 0 free and 0 evictable",
        str(OutOfBlocks(1200, 0, 0)): "1,200 blocks needed, 0 free and 0 evictable",
        str(PinQuotaExceeded(1, 0)): "1 block would be pinned, 0 may be: unpin others, or give the cache more blocks",
        str(TierPart("disk", 16, 1, None)): "1 token from 16 on: in the tier 'disk'",
        slots.refusal("", 1, 1): "1 request is unfinished, and at most 1 may be",
    }
    assert list(messages) == list(messages.values())
