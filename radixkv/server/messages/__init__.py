"""Anthropic's Messages API over the same engine: its content blocks, its events, its errors, and its cache control."""
