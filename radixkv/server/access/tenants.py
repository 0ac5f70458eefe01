"""Tenants: their keys, what each may have, and the cache namespaces of each.

Each API key is a tenant. A prompt's cache namespace is a keyed hash of the tenant's key and the request's cache salt, so that
no client can name or guess another's. The hash's own key is random, or kept beside the blocks where these survive a restart.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus

from radixkv.namespaces import is_derived, salted
from radixkv.scheduling.tenant_share import TenantShare
from radixkv.server.access.keys import Key, hash_of
from radixkv.server.errors import ApiError


@dataclass(frozen=True, slots=True)
class Tenant:
    """All clients with one API key; all clients at once where no keys are configured.

    Attributes:
        name: the prefix of the tenant's namespaces.
        label: what the tenant is called in logs.
        key: its entry in the file of keys; None: its key is not from there.
    """

    name: str
    _secret: bytes
    label: str
    key: Key | None = None

    def namespace(self, cache_salt: str | None = None) -> str:
        """The namespace of the tenant's prompts with this salt."""
        return self.name if cache_salt is None else salted(self.name, _keyed_hash(self._secret, self.name, cache_salt))

    @property
    def share(self) -> TenantShare:
        """What the scheduler is to give the tenant."""
        if self.key is None:
            return TenantShare()
        return TenantShare(self.key.weight, self.key.max_num_seqs, self.key.max_cached_share)

    def owns(self, namespace: str) -> bool:
        return namespace == self.name or is_derived(namespace, self.name)


class Tenants:
    """Authenticates requests.

    Args:
        api_keys: without any, and without ``keys``, all requests are accepted, as those of one tenant.
        admin_key: for administration; None: administration is off.
        keys: from a file, by name; None: there is no file.
        clock: seconds since 1970, for keys that expire.
        secret: of the keyed hash, where namespaces must be the same after a restart; None: a random one.
        metrics_key: must differ from all others; None: there is none.

    Attributes:
        open_to_all: whether requests need no key.

    Raises:
        ValueError: a key is empty or not ASCII, or one is given twice.
    """

    def __init__(
        self,
        api_keys: Sequence[str] = (),
        admin_key: str | None = None,
        keys: Mapping[str, Key] | None = None,
        clock: Callable[[], float] = time.time,
        secret: bytes | None = None,
        metrics_key: str | None = None,
    ) -> None:
        given = [*api_keys, *(key for key in (admin_key, metrics_key) if key is not None)]
        for key in given:
            if not key or not key.isascii() or not key.isprintable():
                raise ValueError("an API, admin or metrics key must be of printable ASCII characters, at least one")
        if len(set(given)) < len(given):
            raise ValueError("an API, admin or metrics key is given twice: all keys must differ")
        self._given_hashes = {hash_of(key) for key in given}
        self._secret = secrets.token_bytes(32) if secret is None else secret
        self._admin_key = admin_key
        self._clock = clock
        self._from_options = {hash_of(key): self._tenant(key) for key in api_keys}
        self.open_to_all = not api_keys and keys is None
        self._has_file = keys is not None
        # By the hash of its key; those of the file come first.
        self._by_hash = self._from_options
        if keys is not None:
            self.replace_keys(keys)

    def replace_keys(self, keys: Mapping[str, Key]) -> None:
        """From now on accept these keys from the file, and no others from it. A name keeps what it has cached.

        Raises:
            ValueError: one of them is given as an API, admin or metrics key, too; nothing is changed then.
        """
        for name, key in keys.items():
            if key.sha256 in self._given_hashes:
                raise ValueError(f"keys.{name}: given as an API, admin or metrics key, too: all keys must differ")
        self._by_hash = {key.sha256: self._named(name, key) for name, key in keys.items()} | self._from_options

    @property
    def shares(self) -> dict[str, TenantShare]:
        """What the scheduler is to give each tenant, by `Tenant.name`."""
        return {tenant.name: tenant.share for tenant in self._by_hash.values() or [self.anonymous_tenant()]}

    @property
    def has_admin_key(self) -> bool:
        """Whether there is administration."""
        return self._admin_key is not None

    def authenticate(self, sent: bytes) -> Tenant:
        """The tenant that a request's key belongs to.

        Args:
            sent: the key; b"": none was sent.

        Raises:
            ApiError: 401, no key or a wrong one.
        """
        if self.open_to_all:
            return self.anonymous_tenant()
        # What the time of the look-up may reveal is about a hash, from which no key follows.
        found = self._by_hash.get(hashlib.sha256(sent).hexdigest())
        if found is None or (found.key is not None and found.key.expired(self._clock())):
            raise unauthorized("API key")
        return found

    def authenticate_admin(self, sent: bytes) -> None:
        """Check the administrator's key.

        Args:
            sent: the key; b"": none was sent.

        Raises:
            ApiError: 403, there is no admin key; 401, none was sent or a wrong one.
        """
        if self._admin_key is None:
            raise ApiError(HTTPStatus.FORBIDDEN, "administration is off: the server was started without --admin-key")
        if not hmac.compare_digest(self._admin_key.encode(), sent):
            raise unauthorized("admin key")

    def anonymous_tenant(self) -> Tenant:
        """The one tenant where no keys are configured."""
        return self._tenant("")

    def by_api_key(self, api_key: str) -> Tenant:
        """The tenant with this key, or with the key of this name in the file.

        Raises:
            ApiError: 404, it is not configured.
        """
        named = (tenant for tenant in self._by_hash.values() if tenant.key is not None and tenant.label == api_key)
        found = self._by_hash.get(hash_of(api_key)) or next(named, None)
        if found is None:
            raise ApiError(HTTPStatus.NOT_FOUND, "api_key: no such key is configured", param="api_key")
        return found

    def by_key_name(self, name: str) -> Tenant:
        """The tenant whose key has this name in the file, or had it before the key was removed.

        Raises:
            ApiError: 400, there is no file.
        """
        if not self._has_file:
            raise ApiError(
                HTTPStatus.BAD_REQUEST, "key_name: expected nothing without a file of keys", param="key_name"
            )
        return self._named(name, None)

    def selected_by_admin(self, api_key: str | None) -> Tenant:
        """The tenant that an administrator's request selects.

        Raises:
            ApiError: 404, no such key is configured; 400, no key was given and there are several tenants.
        """
        if api_key is not None:
            return self.by_api_key(api_key)
        if not self.open_to_all:
            raise ApiError(
                HTTPStatus.BAD_REQUEST,
                "api_key: expected a configured key, got none",
                param="api_key",
            )
        return self.anonymous_tenant()

    def _named(self, name: str, key: Key | None) -> Tenant:
        return Tenant(_keyed_hash(self._secret, "keys file", name), self._secret, name, key)

    def _tenant(self, api_key: str) -> Tenant:
        name = _keyed_hash(self._secret, "", api_key)
        return Tenant(name, self._secret, name[:8])


def _keyed_hash(secret: bytes, context: str, text: str) -> str:
    # With the length in front, no two pairs of context and text yield the same data.
    data = f"{len(context)}:{context}{text}".encode(errors="surrogatepass")
    return hashlib.blake2b(data, key=secret, digest_size=16).hexdigest()


def unauthorized(expected: str) -> ApiError:
    """The answer to a request without the key that it needs."""
    return ApiError(
        HTTPStatus.UNAUTHORIZED,
        f"this needs a valid {expected} in the header 'Authorization: Bearer ...'",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )
