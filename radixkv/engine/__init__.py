"""Requests, scheduling and the model: from token ids to token ids."""
