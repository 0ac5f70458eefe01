"""Encryption of blocks at rest: AES-256-GCM with the operator's key.

Needs cryptography: ``pip install 'radixkv[encryption]'``. With AES instructions, both directions are as fast as a copy.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from radixkv.text_files import parse_hex, read_hex

KEY_VARIABLE = "RADIXKV_STORE_KEY"
KEY_BYTES = 32
NONCE_BYTES = 12
TAG_BYTES = 16


class BlockCipher:
    """Encrypts the blocks of one format.

    The key in use is derived from the operator's by HKDF (RFC 5869), so that two models never share one. Nonces are random,
    so a key serves 2^32 blocks.

    Args:
        key: 32 random bytes.
        salt: differs for each format.

    Attributes:
        name: 8 bytes that differ for each key, and reveal nothing of it.

    Raises:
        ImportError: cryptography is not installed.
        ValueError: the key has another length.
    """

    def __init__(self, key: bytes, salt: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        if len(key) != KEY_BYTES:
            raise ValueError(f"key: expected {KEY_BYTES} bytes, got {len(key)}")
        derived = HKDF(SHA256(), KEY_BYTES + 8, salt, b"radixkv blocks").derive(key)
        self.name = derived[KEY_BYTES:]
        self._aes = AESGCM(derived[:KEY_BYTES])

    def encrypt(self, nonce: bytes, block: memoryview, bound: bytes) -> memoryview:
        """The block's ciphertext and tag, which `decrypt` accepts only together with ``bound``."""
        sealed = np.empty(block.nbytes + TAG_BYTES, dtype=np.uint8).data  # unlike bytes, not zeroed first
        self._aes.encrypt_into(nonce, block, bound, sealed)
        return sealed

    def decrypt(self, nonce: bytes, sealed: memoryview, bound: bytes, out: memoryview) -> bool:
        """Write the decrypted block to ``out``; False if it, or ``bound``, differs from what was encrypted."""
        from cryptography.exceptions import InvalidTag

        try:
            self._aes.decrypt_into(nonce, sealed, bound, out)
        except InvalidTag:
            return False
        return True


def names_key(path: str | Path | None) -> bool:
    """Whether `read_key` would read a key, from a file or from the variable."""
    return path is not None or KEY_VARIABLE in os.environ


def read_key(path: Path | None) -> bytes | None:
    """The operator's key, as 64 hexadecimal digits from a file or from ``RADIXKV_STORE_KEY``.

    Args:
        path: of the file; None: the variable is read.

    Returns:
        None if there is neither file nor variable.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not 64 hexadecimal digits.
    """
    if path is not None:
        return read_hex(path, "store_key_file", KEY_BYTES)
    text = os.environ.get(KEY_VARIABLE)
    return None if text is None else parse_hex(KEY_VARIABLE, text, KEY_BYTES)
