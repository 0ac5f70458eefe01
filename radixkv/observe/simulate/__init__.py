"""Simulation: replays recorded or synthetic traces through the cache, without a model."""
