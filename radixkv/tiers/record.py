"""The record of one block in a store: a header that says which block it is, and the block.

::

    magic 8 | checksum 16 | digest 20 | nonce 12 | tokens 4 per position || block, or ciphertext and tag

The header identifies the block. A store's index may lead to a slot that was given to another block meanwhile, that was half
written when the power failed, or that is on a bad disk: the record is always compared with the key that was asked for. So
correct answers do not depend on the order of writes.

The checksum (xxh3, 128 bits) covers everything after it. Where a partly filled block has no token, its header has -1. The
tokens of an encrypted block are not stored: like the digest, they are bound into its tag, so that a block is decrypted
only with its key and its tokens.
"""

from __future__ import annotations

import enum
import os
import struct
from collections.abc import Sequence

import xxhash

from radixkv.cache.tokens import TOKEN_BYTES
from radixkv.tiers.block_format import BlockFormat
from radixkv.tiers.block_key import DIGEST_BYTES, BlockKey
from radixkv.tiers.encryption import NONCE_BYTES, TAG_BYTES, BlockCipher
from radixkv.tiers.tier import BlockBytes, check_blocks

_MAGIC = b"RadixKV\x01"
_NO_TOKEN = b"\xff"
_CHECKSUM = struct.Struct(f"{len(_MAGIC)}s16s")
_FIELDS = struct.Struct(f"{DIGEST_BYTES}s{NONCE_BYTES}s")


class Verdict(enum.Enum):
    """What a record turns out to be."""

    RIGHT = enum.auto()
    OTHER = enum.auto()  # an intact record of another block
    CORRUPT = enum.auto()


class RecordLayout:
    """What can be known about the records of one format without a key.

    Args:
        block_format: of the blocks.
        sealed: whether they are encrypted.

    Attributes:
        format: of the blocks.
        sealed: whether they are encrypted.
        header_bytes: length of a header.
        body_bytes: length of what follows it.
    """

    def __init__(self, block_format: BlockFormat, *, sealed: bool) -> None:
        self.format = block_format
        self.sealed = sealed
        self._tokens_bytes = TOKEN_BYTES * block_format.block_size
        self.header_bytes = _CHECKSUM.size + _FIELDS.size + self._tokens_bytes
        self.body_bytes = block_format.block_bytes + (TAG_BYTES if sealed else 0)

    def intact(self, header: bytes, body: memoryview) -> bool:
        """Whether a record is as it was written, whichever block it belongs to."""
        return header[: _CHECKSUM.size] == _CHECKSUM.pack(_MAGIC, _checksum(header[_CHECKSUM.size :], body))

    def digest_of(self, header: bytes) -> bytes:
        """The digest of the block that an intact record belongs to."""
        digest: bytes = _FIELDS.unpack_from(header, _CHECKSUM.size)[0]
        return digest


class RecordCodec(RecordLayout):
    """Makes and reads the records of one format.

    Args:
        block_format: of the blocks.
        key: encrypts them, 32 bytes; None: they are stored as they are.

    Attributes:
        name: of the store; differs by format and by key, since records could not be read across these.

    Raises:
        ImportError: a key is given, and cryptography is not installed.
        ValueError: the key has another length.
    """

    def __init__(self, block_format: BlockFormat, key: bytes | None = None) -> None:
        super().__init__(block_format, sealed=key is not None)
        self._cipher = None if key is None else BlockCipher(key, block_format.digest)
        self.name = block_format.digest.hex() + (f"-{self._cipher.name.hex()}" if self._cipher else "")

    def check_rows(self, keys: Sequence[BlockKey], rows: BlockBytes) -> None:
        """Check that there is one row per key, and that rows and keys have the right form.

        Raises:
            ValueError: they do not; the message names the argument.
        """
        check_blocks(rows, len(keys), self.format.block_bytes)
        most = self._tokens_bytes
        for key in keys:
            length = len(key.tokens)
            is_right = length == most if key.is_whole else 0 < length < most and length % TOKEN_BYTES == 0
            if not is_right or len(key.digest) != DIGEST_BYTES:
                expected_length = most if key.is_whole else f"fewer than {most}"
                raise ValueError(
                    f"keys: expected {expected_length} bytes of tokens and a digest of {DIGEST_BYTES}, "
                    f"got {length} and {len(key.digest)}"
                )

    def header_of(self, key: BlockKey) -> bytes:
        """The header that an unencrypted block should have, except for the checksum."""
        return _CHECKSUM.pack(_MAGIC, b"") + self._fields_of(key)

    def encode(self, key: BlockKey, block: memoryview) -> tuple[bytes, memoryview]:
        """Header and body of a block's record; the body may be the block itself."""
        if self._cipher is None:
            fields, body = self._fields_of(key), block
        else:
            nonce = os.urandom(NONCE_BYTES)
            fields = _FIELDS.pack(key.digest, nonce) + bytes(self._tokens_bytes)
            body = self._cipher.encrypt(nonce, block, key.digest + key.tokens)
        return _CHECKSUM.pack(_MAGIC, _checksum(fields, body)) + fields, body

    def decode(self, key: BlockKey, header: bytes, body: memoryview, block: memoryview) -> Verdict:
        """Compare a record with the key that was looked up, and write its block.

        Args:
            key: of the wanted block.
            header: of the record.
            body: of the record; may be ``block``, if records are not encrypted.
            block: where the block goes. Undefined unless the verdict is `Verdict.RIGHT`.
        """
        if self._cipher is None:
            if not self.intact(header, body):
                return Verdict.CORRUPT
            if header[_CHECKSUM.size :] != self._fields_of(key):
                return Verdict.OTHER
            if body is not block:
                block[:] = body
            return Verdict.RIGHT
        digest, nonce = _FIELDS.unpack_from(header, _CHECKSUM.size)
        if digest != key.digest:
            return Verdict.OTHER if self.intact(header, body) else Verdict.CORRUPT
        opened = self._cipher.decrypt(nonce, body, key.digest + key.tokens, block)
        return Verdict.RIGHT if opened else Verdict.CORRUPT

    def seal(self, data: bytes, bound: bytes) -> bytes:
        """Encrypt something short that is stored beside blocks, if blocks are; `unseal` needs the same ``bound``."""
        if self._cipher is None:
            return data
        nonce = os.urandom(NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, memoryview(data), bound)

    def unseal(self, sealed: bytes, bound: bytes) -> bytes | None:
        """The data that `seal` was given; None: it was changed, or bound to something else."""
        if self._cipher is None:
            return sealed
        nonce, body = sealed[:NONCE_BYTES], memoryview(sealed)[NONCE_BYTES:]
        data = memoryview(bytearray(max(0, len(body) - TAG_BYTES)))
        return bytes(data) if len(body) >= TAG_BYTES and self._cipher.decrypt(nonce, body, bound, data) else None

    def _fields_of(self, key: BlockKey) -> bytes:
        """The fields of a block that is not encrypted."""
        return _FIELDS.pack(key.digest, b"") + key.tokens.ljust(self._tokens_bytes, _NO_TOKEN)


def _checksum(fields: bytes, body: memoryview) -> bytes:
    checksum = xxhash.xxh3_128(fields)
    checksum.update(body)
    return checksum.digest()
