"""Where blocks are kept outside the pool: tiers, what they have in common, and the stores that come with RadixKV."""
