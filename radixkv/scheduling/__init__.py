"""Requests and their sequences, the waiting queue, and which of their tokens go into the next batch."""
