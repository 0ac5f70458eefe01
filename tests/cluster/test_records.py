"""What a replica sends of requests is what its readers get, and malformed records are refused."""

from __future__ import annotations

import json
import struct
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.pretended_replicas import LOAD

from radixkv.cluster.records import (
    ArrivedRequest,
    Kind,
    RecordReader,
    decode_arrived,
    decode_load,
    decode_number,
    encode_arrived,
    encode_number,
)

BLOCK = 16
NUMBERS = st.integers(0, 2**64 - 1)


@given(NUMBERS, st.lists(NUMBERS, max_size=50), st.integers(0, BLOCK), st.integers(1, 100))
def test_what_is_sent_of_a_request_is_what_is_read(number: int, hashes: list[int], rest: int, chunk: int) -> None:
    arrived = ArrivedRequest(number, max(1, BLOCK * len(hashes) + rest), hashes)
    data = encode_arrived(arrived) + b"".join(encode_number(kind, number) for kind in (Kind.PREFILLED, Kind.ENDED))
    reader = RecordReader()
    records = [each for at in range(0, len(data), chunk) for each in reader.read(data[at : at + chunk])]
    assert [kind for kind, _ in records] == [Kind.ARRIVED, Kind.PREFILLED, Kind.ENDED]
    assert decode_arrived(records[0][1], BLOCK) == arrived
    assert [decode_number(payload) for _, payload in records[1:]] == [number, number]


@given(st.binary(max_size=60))
def test_other_bytes_than_a_request_s_are_refused_in_one_way(payload: bytes) -> None:
    for decode in (lambda: decode_arrived(payload, BLOCK), lambda: decode_number(payload)):
        try:
            decode()
        except ValueError:
            continue


def test_why_a_request_is_refused() -> None:
    for payload, message in (
        (b"", "expected a request and the hashes of its blocks, got 0 bytes"),
        (bytes(16 + 7), "expected a request and the hashes of its blocks, got 23 bytes"),
        (bytes(16), "expected a prompt of at least 1 tokens, got 0"),
        (struct.pack("<4Q", 1, 31, 3, 4), "expected a prompt of at least 32 tokens, got 31"),
    ):
        with pytest.raises(ValueError, match=message):
            decode_arrived(payload, BLOCK)
    with pytest.raises(ValueError, match="expected 8 bytes, got 9"):
        decode_number(bytes(9))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_running": 1.5}, r"num_running of a replica as a whole number from 0 to 2\*\*63 - 1, got 1.5"),
        ({"num_free_blocks": -1}, "num_free_blocks of a replica as a whole number from 0 to .*, got -1"),
        ({"num_queued_tokens": 2**63}, "num_queued_tokens of a replica .*, got 9223372036854775808"),
        ({"num_decoding": 10**400}, "num_decoding of a replica .*, got 1000"),
        ({"counters": {"num_steps": -1}}, r"what a replica counts as numbers from 0 to 2\*\*63 - 1, got -1"),
        ({"counters": {"num_steps": 10**400}}, "what a replica counts .*, got 1000"),
        ({"counters": {"num_steps": "9"}}, "what a replica counts .*, got '9'"),
        ({"counters": {"num_steps": True}}, "what a replica counts .*, got True"),
        ({"counters": [1]}, "expected what a replica has to do, got b'"),
        ({"counters": None}, "expected what a replica has to do, got b'"),
        ({"prefill_seconds_per_token": 0}, "seconds above 0 for a token of a prompt, got 0"),
        ({"prefill_seconds_per_token": 10**400}, "seconds above 0 for a token of a prompt, got 1000"),
    ],
)
def test_a_load_that_cannot_be_counted_with_is_refused(fields: dict[str, object], message: str) -> None:
    assert decode_load(json.dumps(asdict(LOAD)).encode()) == LOAD
    with pytest.raises(ValueError, match=message):
        decode_load(json.dumps({**asdict(LOAD), **fields}).encode())
