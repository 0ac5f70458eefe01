"""Tiers, where blocks are kept outside the pool: their interface, common parts, and the stores that come with RadixKV."""
