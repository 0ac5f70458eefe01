"""What would it take? Replays of recorded requests through the cache, without a model."""
