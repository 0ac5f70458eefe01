"""Decoding with drafts and without: tokens a second, and whether the tokens are the same."""
