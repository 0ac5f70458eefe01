"""API keys in a file: who may use the server, how much, and until when.

The file holds only SHA-256 hashes. (Keys are long and random, so no slower hash is needed.)

::

    [keys.ann]
    sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
    weight = 2.0
    tokens_per_minute = 100_000
    expires = 2027-01-31T00:00:00Z
"""

from __future__ import annotations

import hashlib
import re
import secrets
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from radixkv.config import Config
from radixkv.option_words import hint
from radixkv.text_files import read_utf8


class Key(Config):
    """One key's entry."""

    sha256: str = Field(repr=False)
    """The key's SHA-256 hash, in hexadecimal digits."""
    weight: float = Field(default=1.0, gt=0, le=1000)
    """The tenant's share, relative to those of others."""
    expires: datetime | None = None
    """Until when the key is valid, such as 2027-01-31T00:00:00Z; in UTC where it does not say."""
    requests_per_minute: int | None = Field(default=None, ge=1)
    """Requests a minute at most, on average and at once."""
    tokens_per_minute: int | None = Field(default=None, ge=1)
    """Tokens a minute at most, those of prompts and those generated."""
    max_num_seqs: int | None = Field(default=None, ge=1)
    """Sequences that run side by side at most; more wait."""
    max_cached_share: float | None = Field(default=None, ge=0, le=1)
    """Part of all blocks that it may keep cached while others need blocks; what it has beyond is evicted first."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Tokens that one request may generate at most."""

    @field_validator("sha256")
    @classmethod
    def _is_hash(cls, given: str) -> str:
        if not re.fullmatch("[0-9a-f]{64}", given):
            # It may be the key itself, which no log should hold.
            raise ValueError(f"sha256: expected 64 hexadecimal digits in lower case, got {len(given)} characters")
        return given

    def expired(self, now: float) -> bool:
        """Whether the key is no longer valid.

        Args:
            now: seconds since 1970.
        """
        if self.expires is None:
            return False
        expires = self.expires if self.expires.tzinfo else self.expires.replace(tzinfo=UTC)
        return now >= expires.timestamp()


def read_keys_file(path: Path) -> dict[str, Key]:
    """The keys in a TOML file, by name.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not such a file; one line with the path, the key's name and the field.
    """
    text = read_utf8(path, "keys_file")
    try:
        table = tomllib.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}: not TOML: {error}") from None
    for name in table:
        if name != "keys":
            raise ValueError(f"{path}: {name}: unknown; expected a table [keys.NAME] per key")
    entries = table.get("keys", {})
    if not isinstance(entries, dict):
        raise ValueError(f"{path}: keys: expected a table [keys.NAME] per key, got {entries!r:.80}")
    for name in entries:
        if not (0 < len(name) <= 64 and name.isascii() and name.isprintable()):
            raise ValueError(f"{path}: keys.{name!r:.80}: expected a name of up to 64 printable ASCII characters")
    keys = {name: _key(f"{path}: keys.{name}", name, entry) for name, entry in entries.items()}
    names: dict[str, str] = {}
    for name, key in keys.items():
        other = names.setdefault(key.sha256, name)
        if other != name:
            raise ValueError(f"{path}: keys.{name}: the same key as keys.{other}")
    return keys


def _key(where: str, name: str, entry: Any) -> Key:
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: expected a table, got {entry!r:.80}")
    for field in entry:
        if field not in Key.model_fields:
            raise ValueError(f"{where}.{field}: unknown{hint(field, Key.model_fields)}")
    if "sha256" not in entry:
        raise ValueError(f"{where}.sha256: missing; `radixkv keys new {name}` makes a key and its entry")
    try:
        return Key(**entry)
    except ValueError as error:
        raise ValueError(f"{where}.{error}") from None


def hash_of(key: str) -> str:
    """The form in which the file holds a key."""
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()


def new_key() -> str:
    """A key of 256 random bits."""
    return f"rk-{secrets.token_urlsafe(32)}"
