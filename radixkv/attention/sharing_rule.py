"""When reading a prefix once for all sequences that share it pays."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SharingRule:
    """When a backend gains by reading a shared prefix once.

    Each sequence alone reads it once for each tile of its rows; together they read it once for each tile of all their rows.
    What the difference saves must be worth what sharing costs.

    Attributes:
        cost_tokens: reading the prefix once costs as much as reading so many keys, however many rows share it.
        cost_per_row: and so many for each of the sequences' rows, which get one more partial result.
        rows_per_reading: rows of a tile; None: any number.
        max_levels: how many shared prefixes may lie above one another in a sequence; None: any number. A row has as many
            partial results, and one of its own keys.
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
        """Whether a prefix is read once that so many rows share, if that saves reading so many keys."""
        return saved_tokens >= self.cost_tokens and saved_tokens > self.cost_per_row * num_rows
