"""When it pays to read a prefix once for all sequences that share it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingRule:
    """When a backend gains by reading a shared prefix once.

    Read separately, a prefix is read once per tile of each sequence's rows; read together, once per tile of all rows. What
    the difference saves must exceed what sharing costs.

    Attributes:
        cost_tokens: the fixed cost of sharing a prefix, in keys that could be read in the same time.
        cost_per_row: the further cost for each of the sequences' rows, which get one more partial result, in keys.
        rows_per_reading: rows of a tile; None: unlimited.
        max_levels: how many shared prefixes a sequence may have, one continuing another; None: unlimited. A row has a
            partial result for each, and one for its private keys.
        min_saved_tokens: a decoding batch that would save reading fewer keys than this, per layer, is planned flat.
    """

    cost_tokens: int = 0
    cost_per_row: float = 0.0
    rows_per_reading: int | None = None
    max_levels: int | None = None
    min_saved_tokens: int = 0

    def readings(self, num_rows: int) -> int:
        """How many times neighbouring rows read a key that all of them see."""
        return 1 if self.rows_per_reading is None else -(-num_rows // self.rows_per_reading)

    def pays(self, saved_tokens: int, num_rows: int) -> bool:
        """Whether reading a prefix once for all ``num_rows`` rows that share it pays, if that saves ``saved_tokens`` keys."""
        return saved_tokens >= self.cost_tokens and saved_tokens > self.cost_per_row * num_rows
