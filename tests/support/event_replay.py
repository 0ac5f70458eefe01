"""Requests a replay of KV events, like a subscriber that missed some."""

from __future__ import annotations

from typing import Any

import zmq
from support.time_limit import HANGING


def replay_events(context: zmq.Context[Any], endpoint: str, start: int) -> list[tuple[int, bytes]]:
    """Every batch from sequence number ``start`` on. One request has many replies, so a DEALER takes the place of a REQ."""
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.RCVTIMEO, 1000 * HANGING)
    dealer.connect(endpoint)
    dealer.send_multipart([b"", start.to_bytes(8, "big")])
    batches = []
    while True:
        _, number, batch = dealer.recv_multipart()
        if not batch:
            assert number == (-1).to_bytes(8, "big", signed=True)
            return batches
        batches.append((int.from_bytes(number, "big"), batch))
