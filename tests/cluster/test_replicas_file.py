"""The file in which an ingress finds its replicas: read as a whole, or not at all."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from support.pretended_replicas import Cluster, until

from radixkv.cluster.membership import Membership, read_replicas


def test_a_list_of_replicas_has_a_name_and_a_url_in_each_line(tmp_path: Path) -> None:
    file = tmp_path / "replicas"
    file.write_text("# all of them\n\n a = http://one:1 # the first\nb=unix:///two\n")
    assert read_replicas(file) == {"a": "http://one:1", "b": "unix:///two"}
    for text, expected in [
        ("a=http://one\na=http://two", "line 2: 'a' is given twice"),
        ("\na http://one", "line 2: expected NAME=URL, got 'a http://one'"),
        ("=http://one", "line 1: expected NAME=URL, got '=http://one'"),
        ("a = # http://one", "line 1: expected NAME=URL, got 'a ='"),
    ]:
        file.write_text(text)
        with pytest.raises(ValueError, match=rf"^{file}: {expected}$"):
            read_replicas(file)


def test_a_list_of_replicas_in_another_encoding_is_named(tmp_path: Path) -> None:
    file = tmp_path / "replicas"
    file.write_bytes("a=http://one  # für alle".encode("latin-1"))
    with pytest.raises(ValueError, match=rf"{file}: expected UTF-8: .*0xfc"):
        read_replicas(file)


def reload_one_replica(file: Path, *given: dict[str, str]) -> None:
    """Reload a file beside replicas that are given otherwise, one after another, where one is up: nothing may change."""

    async def main() -> None:
        replicas = Cluster().replicas()
        membership = Membership(replicas, {"a": "http://a"})
        await membership.wait_for_first()
        await until(lambda: not membership._changing)
        for each in given:
            membership.reload(each, file)
            assert not membership._changing
            assert replicas.available == replicas.names == ["a"]
        await membership.close()
        await replicas.close()

    asyncio.run(main())


def test_a_list_with_an_impossible_url_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The replica of that name used to be removed before its new url was looked at."""
    file = tmp_path / "replicas"
    file.write_text("b = http://b\na = http://a:81OO\n")
    reload_one_replica(file, {})
    assert f"{file}: line 2: 'a': url: expected http://host:port or unix:///path, got 'http://a:81OO'" in caplog.text


def test_an_empty_list_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "replicas"
    file.write_text("# a = http://a\n")
    reload_one_replica(file, {}, {"a": "http://a"})
    (error,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert error == f"replicas are kept as they were: {file}: expected at least one NAME=URL, got none"


async def test_a_list_that_is_read_again_adds_and_removes_replicas(tmp_path: Path) -> None:
    file = tmp_path / "replicas"
    replicas, given = Cluster().replicas(), {"a": "http://a"}
    membership = Membership(replicas, given)
    await membership.wait_for_first()
    for name in "bc":
        file.write_text(f"{name} = http://{name}\n")
        membership.reload(given, file)
        await until(lambda name=name: not membership._changing and sorted(replicas.available) == ["a", name])
    await membership.close()
    await replicas.close()
