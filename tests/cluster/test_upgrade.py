"""Two versions side by side, each with an ingress of its own, as the guide to upgrades says."""

from __future__ import annotations

import pytest
from support.pretended_replicas import Cluster, answering, line, tokens, until

from radixkv import __version__
from radixkv.cluster import MismatchError, generations
from radixkv.cluster.membership import Membership


async def test_each_ingress_refuses_the_other_version_s_replicas_and_goes_on_with_its_own(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = Cluster()
    cluster.identities = {"http://old": {"version": "0.0.1"}, "http://new": {"version": __version__}}
    cluster.answers["/generate"] = answering(line(7, "length"))
    monkeypatch.setattr(generations, "__version__", "0.0.1")
    old, new, refused = (cluster.replicas() for _ in range(3))
    of_old, of_refused = Membership(old, {"old": "http://old"}), Membership(refused, {"old": "http://old"})
    await of_old.wait_for_first()
    of_old.update({"old": "http://old", "new": "http://new"})
    await until(lambda: "runs RadixKV" in caplog.text)
    assert old.available == ["old"]
    assert await tokens(old.streams) == [7]
    monkeypatch.setattr(generations, "__version__", __version__)
    with pytest.raises(MismatchError, match=f"'old' at http://old runs RadixKV 0.0.1; .* version, {__version__}$"):
        await of_refused.wait_for_first()
    await new.add("new", "http://new")
    for replicas in (new, old):
        assert await tokens(replicas.streams) == [7]
    for membership in (of_old, of_refused):
        await membership.close()
    for replicas in (old, refused):
        await replicas.close()
    assert await tokens(new.streams) == [7]
    await new.close()
    assert f"'new' at http://new runs RadixKV {__version__}; expected this ingress's version, 0.0.1" in caplog.text
