"""What tiers below the pool gain and cost."""
