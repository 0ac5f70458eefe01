"""Snapshots show what a cache holds, survive JSON, and can be drawn."""

from __future__ import annotations

import io
import json
import re
import socketserver
import threading
import urllib.error
import urllib.request
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import NoReturn

import pytest
from rich.console import Console
from support.cache_driver import leave
from typer.testing import CliRunner

from radixkv.cache import PrefixCache
from radixkv.cli.main import app
from radixkv.observe.inspect.picture import to_svg
from radixkv.observe.inspect.replica_snapshots import join_snapshots, read_snapshots
from radixkv.observe.inspect.snapshot import CacheSnapshot, take_snapshot
from radixkv.observe.inspect.source import read_source
from radixkv.observe.inspect.terminal import draw


def decode(tokens: list[int]) -> str:
    return " ".join(f"<{token}>" for token in tokens)


@contextmanager
def answering_once(status: int, headers: Mapping[str, str] | None = None, body: bytes = b"") -> Iterator[str]:
    """The URL of a server that answers one request."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/cache"
        thread.join()


@pytest.fixture
def snapshot() -> CacheSnapshot:
    """Three answers under one system prompt of three blocks, and another tenant's prompt."""
    now = [50.0]
    cache = PrefixCache(40, 2, clock=lambda: now[0])
    for number in range(3):
        leave(cache, [1, 2, 3, 4, 5, 6, 10 + number, 7, 8])
    leave(cache, [1, 2], namespace="a secret salt")
    now[0] += 5
    return take_snapshot(cache, decode, bytes_per_block=1 << 20)


def test_what_sharing_saves_is_counted(snapshot: CacheSnapshot) -> None:
    assert snapshot.num_cached_blocks == 3 + 3 * 2 + 1
    assert snapshot.num_unshared_blocks == 3 * (3 + 2) + 1
    assert snapshot.sharing_factor == pytest.approx(16 / 10)
    assert snapshot.saved_bytes == 6 << 20
    system = next(node for node in snapshot.nodes if node.num_tokens == 6)
    assert (system.uses, system.num_live, system.idle_seconds, system.depth_tokens) == (3, 0, 5, 0)
    assert snapshot.blocks_below()[snapshot.nodes.index(system)] == 9


def test_a_snapshot_survives_json_and_names_no_namespace(snapshot: CacheSnapshot) -> None:
    text = snapshot.to_json()
    assert read_snapshots(text) == {None: snapshot}
    assert "secret" not in text


def test_a_node_before_its_parent_is_refused(snapshot: CacheSnapshot) -> None:
    fields = json.loads(snapshot.to_json())
    fields["nodes"][0]["parent"] = 2
    with pytest.raises(ValueError, match="before its parent"):
        CacheSnapshot.from_fields(fields)


def test_an_empty_cache_can_be_shown() -> None:
    snapshot = take_snapshot(PrefixCache(4, 2), None, None)
    assert (snapshot.sharing_factor, snapshot.saved_bytes) == (0, None)
    ElementTree.fromstring(to_svg(snapshot))
    Console(quiet=True).print(draw(snapshot))


def test_the_terminal_shows_the_tree_and_its_figures(snapshot: CacheSnapshot) -> None:
    shown = io.StringIO()
    Console(file=shown, width=160).print(draw(snapshot, max_children=2))
    text = shown.getvalue()
    for expected in (
        "1.60 times as many",
        "6.0 MiB saved",
        "own blocks",
        "… and 1 more",
        "used 3 times",
        "used 1 time ",
        "<1> <2> <3>",
        "namespace ",
    ):
        assert expected in text
    assert "secret" not in text


def test_in_the_tree_one_is_no_plural() -> None:
    cache = PrefixCache(40, 2)
    leave(cache, [1, 2])
    shown = io.StringIO()
    Console(file=shown, width=160).print(draw(take_snapshot(cache, decode, None)))
    _, _, tree = shown.getvalue().partition("radix tree")
    assert "2 tokens    1 block  used 1 time  <1> <2>" in tree


def test_control_characters_of_prompts_reach_neither_terminal_nor_picture() -> None:
    """A form feed in a prompt used to make the picture one that no viewer opens."""
    cache = PrefixCache(40, 2)
    leave(cache, [1, 2, 3, 4])
    taken = take_snapshot(cache, lambda tokens: "\x1b[2Jpage\x0ctwo\x9b\ufffe<\n", None)
    picture = "".join(ElementTree.fromstring(to_svg(taken)).itertext())
    shown = io.StringIO()
    Console(file=shown, width=160).print(draw(taken))
    for text in (picture, shown.getvalue()):
        assert r"\x1b[2Jpage\x0ctwo\x9b\ufffe<\n" in text


def test_the_picture_has_one_rectangle_per_node_and_no_markup_from_texts(snapshot: CacheSnapshot) -> None:
    picture = ElementTree.fromstring(to_svg(snapshot))
    rectangles = picture.findall("{http://www.w3.org/2000/svg}rect")
    assert len(rectangles) == len(snapshot.nodes)
    bottoms = [float(r.attrib["y"]) + float(r.attrib["height"]) for r in rectangles]
    assert max(bottoms) <= float(picture.attrib["height"]) + 0.5


def test_the_command_shows_every_replica(snapshot: CacheSnapshot, tmp_path: Path) -> None:
    empty = take_snapshot(PrefixCache(4, 2), None, None)
    path = tmp_path / "caches.json"
    path.write_text(join_snapshots({'a "[b]"': snapshot.to_json(), "c": empty.to_json()}))
    shown = CliRunner().invoke(app, ["inspect", str(path)])
    assert shown.exit_code == 0, shown.output
    assert shown.output.count("radix tree") == 2
    assert 'replica a "[b]"' in shown.output
    printed = CliRunner().invoke(app, ["inspect", str(path), "--json"])
    assert read_snapshots(printed.output) == {'a "[b]"': snapshot, "c": empty}
    refused = CliRunner().invoke(app, ["inspect", str(path), "--svg", str(tmp_path / "tree.svg")])
    assert "--svg: expected one cache, got those of 2 replicas" in str(refused.exception)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"a snapshot of a cache, got no JSON: Expecting value"),
        ("nothing", r"a snapshot of a cache, got no JSON: Expecting value"),
        ("[" * 100_000, r"a snapshot of a cache, got no JSON: "),
        ('{"format": "radixkv-replica-snapshots", "version": 2}', "snapshots of caches .* got version 2"),
        (join_snapshots({"a": "{}"}), "a snapshot of a cache .*: 'format' is missing"),
        ("5", "a snapshot of a cache .*: it is not a JSON object"),
        ('{"format": "radixkv-snapshot", "version": 1, "nodes": [], "x": 1}', ".*: it has other fields$"),
        ("null", ".*: it is not a JSON object$"),
        ("{}", ".*: 'format' is missing$"),
        ('{"format": "other", "version": 1}', ".*: another format or version$"),
        ('{"format": "radixkv-snapshot", "version": 2}', ".*: another format or version$"),
    ],
)
def test_other_documents_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^expected {message}"):
        read_snapshots(text)


def test_the_command_reads_files_and_servers(snapshot: CacheSnapshot, tmp_path: Path) -> None:
    path = tmp_path / "cache.json"
    path.write_text(snapshot.to_json())
    shown = CliRunner().invoke(app, ["inspect", str(path), "--svg", str(tmp_path / "tree.svg")])
    assert shown.exit_code == 0, shown.output
    assert "radix tree" in shown.output
    assert (tmp_path / "tree.svg").read_text().startswith("<svg")

    with answering_once(200, body=snapshot.to_json().encode()) as url:
        answer = CliRunner().invoke(app, ["inspect", url, "--json"])
    assert read_snapshots(answer.output) == {None: snapshot}


def test_a_broken_url_is_named() -> None:
    with pytest.raises(ValueError, match=r"source: expected a file or a URL, got 'http://\[::1' \(Invalid IPv6 URL\)"):
        read_source("http://[::1")


@pytest.mark.parametrize(
    ("status", "body", "complaint"),
    [
        (404, b"", "HTTP Error 404: Not Found"),
        (200, b"<!doctype html>", "expected a snapshot of a cache, got no JSON: .*"),
        (200, b"{}", r"expected a snapshot of a cache \(radixkv-snapshot, version 1\): 'format' is missing"),
    ],
    ids=["404", "page", "JSON"],
)
def test_a_url_of_something_else_is_refused_with_where_a_snapshot_is(status: int, body: bytes, complaint: str) -> None:
    with answering_once(status, body=body) as url, pytest.raises((OSError, ValueError)) as refusal:
        read_source(url)
    hint = r" \(radixkv serve has its snapshot at http://HOST:PORT/admin/snapshot, and PORT is 8000 unless it was set\)"
    assert re.fullmatch(f"{url}: {complaint}{hint}", str(refusal.value))


def test_the_error_for_a_url_without_a_port_names_the_usual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing listens on port 80, "connection refused" said nothing of it."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise urllib.error.URLError("refused")

    monkeypatch.setattr(urllib.request.OpenerDirector, "open", refuse)
    with pytest.raises(
        OSError, match=r"^http://localhost/admin/snapshot: refused \(.* PORT is 8000 unless it was set\)$"
    ):
        read_source("http://localhost/admin/snapshot")
    with pytest.raises(OSError, match=r"^http://localhost:8001/admin/snapshot: refused$"):
        read_source("http://localhost:8001/admin/snapshot")


def test_a_redirect_is_not_followed_with_the_admin_key() -> None:
    """The key is for the server that was named."""
    with answering_once(302, {"Location": "http://127.0.0.1:9/elsewhere"}) as url:
        answer = CliRunner().invoke(app, ["inspect", url, "--admin-key", "KEY"])
    assert answer.exit_code != 0
    assert "302" in str(answer.exception)


def test_a_server_that_does_not_speak_http_is_named() -> None:
    with socketserver.TCPServer(("127.0.0.1", 0), _Nonsense) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        url = f"http://127.0.0.1:{server.server_address[1]}/"
        with pytest.raises(OSError, match=f"^{url}: the answer is not HTTP: "):
            read_source(url)
        thread.join()
    with pytest.raises(ValueError, match=r"^source: expected a file or a URL, got 'http://localhost:80O0/'"):
        read_source("http://localhost:80O0/")


class _Nonsense(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        self.rfile.readline()
        self.wfile.write(b"220 mail.example ESMTP\r\n")


def test_an_ingress_without_replicas_has_a_snapshot(tmp_path: Path) -> None:
    file = tmp_path / "none.json"
    file.write_text(join_snapshots({}))
    for options, said in (([], "no replica is there\n"), (["--json"], f"{join_snapshots({})}\n")):
        result = CliRunner().invoke(app, ["inspect", str(file), *options])
        assert (result.exit_code, result.output) == (0, said)
