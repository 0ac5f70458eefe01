"""What tiers below the pool bring and cost."""
