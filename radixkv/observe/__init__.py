"""Seeing into the cache: inspect it, explain a miss, publish its events, simulate a trace."""
