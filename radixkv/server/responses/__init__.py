"""OpenAI's Responses API over the same engine: its items, its events, and a bounded memory of earlier responses."""
