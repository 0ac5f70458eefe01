"""What a drafter is: it sees the tokens of a sequence, and guesses the next ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

if TYPE_CHECKING:
    from radixkv.cache import BlockTable


class Grammar(Protocol):
    """The interface, for drafters, of the grammar that constrains an answer."""

    def likely_tokens(self, last: int, followers: Mapping[int, Sequence[int]], max_tokens: int) -> list[int]:
        """Tokens that spell what must come next; where there is a choice, what followed the same token before."""


class Draft(NamedTuple):
    """A guess of the next tokens.

    Attributes:
        token_ids: the next token first; any collection of whole numbers, NumPy's and torch's included.
        strength: how good the reason for it is, on a scale of the drafter's own, such as the length of a match. How often
            drafts prove right is learned for each strength separately.
    """

    token_ids: Sequence[int]
    strength: int = 0


NO_DRAFT = Draft(())


class Notes(MutableMapping["Drafter", Any]):
    """What drafters keep of one sequence. Each is known by its identity: dataclasses may be equal, and have no hash."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[Drafter, Any]] = {}

    def __getitem__(self, drafter: Drafter) -> Any:
        return self._by_id[id(drafter)][1]

    def __setitem__(self, drafter: Drafter, note: Any) -> None:
        self._by_id[id(drafter)] = drafter, note

    def __delitem__(self, drafter: Drafter) -> None:
        del self._by_id[id(drafter)]

    def __iter__(self) -> Iterator[Drafter]:
        return (drafter for drafter, _ in self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)


# With slots, a name that is not a field raises.
@dataclass(eq=False, slots=True)
class DraftContext:
    """A sequence as drafters see it.

    They only read it, except ``notes``.

    Attributes:
        token_ids: prompt and answer so far; grows in place.
        num_prompt_tokens: how many of them are the prompt, at least 1.
        namespace: only what was cached under it may be looked at: the timing of a draft would reveal another tenant's text.
        read_cache: whether the request reads the cache; if not, what other requests said may not be looked at.
        write_cache: whether it writes the cache; if not, what it says may not be kept for others.
        prediction: what the client expects of the answer, as token ids.
        grammar: constrains the answer, in the state after the last token; None: unconstrained.
        table: the sequence's blocks.
        notes: what each drafter keeps of this sequence for its next draft.
    """

    token_ids: list[int]
    num_prompt_tokens: int
    namespace: str = ""
    read_cache: bool = True
    write_cache: bool = True
    prediction: Sequence[int] = ()
    grammar: Grammar | None = None
    table: BlockTable | None = None
    notes: MutableMapping[Drafter, Any] = field(default_factory=Notes)


class Drafter(ABC):
    """Guesses how sequences go on; make a subclass and give it to an engine as ``speculative_config={"drafters": [...]}``.

    It is called for decoding sequences, in every step if they are few, so it should take microseconds. Its result is checked:
    if it raises, or guesses ids outside the vocabulary or more than asked, that draft is dropped.

    Attributes:
        source: its name in metrics, which no other drafter has; a subclass sets it.
    """

    source: ClassVar[str]

    @abstractmethod
    def draft(self, context: DraftContext, max_tokens: int) -> Draft:
        """The guess; `NO_DRAFT` where there is none.

        Args:
            context: the sequence.
            max_tokens: most tokens to guess; at least 1.
        """
