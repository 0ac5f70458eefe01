"""How the namespaces of one tenant are named: by the tenant's name, and by ``name/salt`` where a cache salt is given.

Tiers, drafters and selections rely on this; to the cache, a namespace is any string.
"""

from __future__ import annotations


def salted(name: str, salt: str) -> str:
    """The namespace derived from another one by a salt."""
    return f"{name}/{salt}"


def is_derived(namespace: str, name: str) -> bool:
    """Whether a namespace is derived from the one of this name by a salt."""
    return namespace.startswith(f"{name}/")


def namespace_group(namespace: str) -> str:
    """The group of namespaces that tiers clear together: all of a tenant's, whatever their salts.

    A tier cannot list the namespaces that it holds, so without groups, clearing a tenant after a restart would need all its
    salts.
    """
    return namespace.partition("/")[0]


def salt_of(namespace: str) -> str:
    """The salt by which a namespace is derived; empty where it is a tenant's own."""
    return namespace.partition("/")[2]
