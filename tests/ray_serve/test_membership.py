"""An ingress's replicas are those that the registry lists, without Ray."""

from __future__ import annotations

import asyncio

import pytest
from support.pretended_replicas import Cluster, until

from radixkv.ray.membership import RegistryMembership
from radixkv.ray.registry import Listing


def test_an_ingress_follows_the_registry_and_notices_when_it_is_outdated(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        cluster = Cluster()
        cluster.identities["http://other"] = {"block_size": 8}
        replicas = cluster.replicas()
        membership = RegistryMembership(replicas)
        membership.follow(Listing({"a": "http://a"}, complete=False))
        await membership.wait_for_first()
        assert replicas.available == ["a"]
        both = Listing({"a": "http://a", "other": "http://other"}, complete=True)
        membership.follow(both)
        await until(lambda: "block_size: 16, and 8 there" in caplog.text)
        membership.follow(both)
        assert not membership.is_outdated
        membership.follow(Listing({"other": "http://other"}, complete=False))  # it may just not have reported yet
        assert replicas.available == ["a"]
        membership.follow(Listing({"other": "http://other"}, complete=True))
        await until(lambda: membership.is_outdated)
        assert replicas.added == []
        assert len(cluster.made) == 2  # what was refused is not tried again
        await membership.close()

    asyncio.run(main())
