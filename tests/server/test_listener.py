"""Where the server listens, and who can reach it."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from radixkv.server.config import ServerConfig
from radixkv.server.run import run_server
from radixkv.server.transport.listener import address_of, is_private, listen, tcp_listener, unix_listener


@pytest.mark.parametrize(("host", "private"), [("127.0.0.1", True), ("localhost", True), ("0.0.0.0", False)])
def test_who_can_reach_an_address(host: str, private: bool) -> None:
    with tcp_listener(host, 0) as listener:
        assert is_private(listener) is private
        port = listener.getsockname()[1]
        assert address_of(listener, encrypted=True).endswith(f":{port}")
        assert address_of(listener, encrypted=True).startswith("https://")


def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    # What a killed process left is removed; what a live one listens on is not.
    with unix_listener(path) as listener:
        listener.listen()
        assert is_private(listener)
        assert address_of(listener, encrypted=False) == f"unix:{path}"
        with pytest.raises(OSError, match=f"cannot listen on {path}: Address already in use"), unix_listener(path):
            pass
        assert path.exists()
    assert not path.exists()
    path.write_text("a file")
    with pytest.raises(OSError, match="cannot listen on"), unix_listener(path):
        pass
    assert path.read_text() == "a file"


def test_a_unix_socket_is_not_taken_from_a_server_that_does_not_listen_yet(tmp_path: Path) -> None:
    """A server still loading its model used to be taken for killed; whichever ended first then removed the other's socket."""
    path = tmp_path / "socket"
    with unix_listener(path) as listener:
        with pytest.raises(OSError, match=f"cannot listen on {path}: Address already in use"), unix_listener(path):
            pass
        listen(listener, 1)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    with unix_listener(path), socket.socket(socket.AF_UNIX) as other:
        path.unlink()
        other.bind(str(path))
    assert path.exists()


def test_a_lock_that_cannot_be_taken_is_named(tmp_path: Path) -> None:
    """The error used to name the socket as the cause, which did not even exist."""
    path = tmp_path / "socket"
    (tmp_path / "socket.lock").symlink_to(tmp_path / "socket.lock")
    with (
        pytest.raises(OSError, match=f"cannot listen on {path}: its lock {path}.lock: Too many levels"),
        unix_listener(path),
    ):
        pass
    long = tmp_path / ("x" * 200)
    with pytest.raises(OSError, match=r"expected at most 107 bytes, got \d+"), unix_listener(long):
        pass
    assert not list(tmp_path.glob("x*"))


def test_the_error_of_a_unix_socket_without_a_folder_has_a_remedy(tmp_path: Path) -> None:
    path = tmp_path / "none" / "socket"
    with (
        pytest.raises(OSError, match=f"cannot listen on {path}: there is no folder {path.parent}; make it"),
        unix_listener(path),
    ):
        pass


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::", 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    "host",
    ["0.0.0.0", pytest.param("::", marks=pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6"))],
)
def test_without_keys_only_this_machine_can_connect(host: str) -> None:
    config = ServerConfig(model="/no/such/model", host=host, port=0)
    with pytest.raises(ValueError, match="there are no API keys; set api_keys or keys_file, or allow_unauthenticated"):
        run_server(config, {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ssl_certfile": "/no/such/file"}, "ssl_certfile: /no/such/file .* No such file"),
        ({"ssl_certfile": __file__}, "ssl_certfile: .* cannot be used"),
        ({"metrics_key": ""}, "metrics key must be of printable ASCII"),
        ({"api_keys": ("",)}, "must be of printable ASCII"),
        ({"api_keys": ("x", "x")}, "given twice"),
        ({"api_keys": ("x",), "admin_key": "x"}, "given twice"),
        ({"api_keys": ("x",), "metrics_key": "x"}, "given twice"),
        ({"admin_key": "x", "metrics_key": "x"}, "given twice"),
        ({"host": "256.0.0.1"}, "cannot listen on 256.0.0.1:0"),
        (
            {"access_log": "/no/such/folder/log"},
            "access_log: cannot write /no/such/folder/log: No such file or directory",
        ),
        ({"keys_file": "/no/such/keys.toml"}, "keys_file: cannot read /no/such/keys.toml: No such file or directory"),
    ],
)
def test_what_cannot_work_is_known_before_the_model_is_loaded(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, OSError), match=message):
        run_server(ServerConfig(model="/no/such/model", port=0, **options), {})


@pytest.mark.parametrize(
    "origin", ["app.example", "https://app.example/", "https://app.example/page", "https://App.example", "", "https://"]
)
def test_an_origin_that_no_browser_sends_is_refused(origin: str) -> None:
    """It used to be accepted, and then no page was let in."""
    with pytest.raises(
        ValueError, match=f"cors_origins: expected origins such as https://app.example, .*; got {origin!r}"
    ):
        ServerConfig(cors_origins=["https://ok.example", origin])


@pytest.mark.parametrize(
    "origin",
    ["*", "null", "https://app.example", "http://localhost:3000", "http://[::1]:3000", "moz-extension://1a-2b"],
)
def test_an_origin_is_what_a_browser_sends(origin: str) -> None:
    assert ServerConfig(cors_origins=[origin]).cors_origins == (origin,)


def test_a_model_is_served_by_a_name() -> None:
    with pytest.raises(ValueError, match="served_model_name: expected names, got ''"):
        ServerConfig(served_model_name=["mine", ""])


def test_a_key_file_needs_a_certificate() -> None:
    with pytest.raises(ValueError, match="ssl_keyfile: expected an ssl_certfile with it"):
        ServerConfig(ssl_keyfile="key.pem")


@pytest.mark.parametrize(("name", "value"), [("host", "0.0.0.0"), ("port", 8001)])
def test_an_address_beside_a_unix_socket_is_refused(name: str, value: str | int) -> None:
    """It used to be ignored."""
    with pytest.raises(ValueError, match=f"{name}: expected none beside uds, got {value!r}"):
        ServerConfig(uds="socket", **{name: value})


def test_an_address_of_metrics_needs_a_port() -> None:
    """It used to be ignored."""
    with pytest.raises(ValueError, match="metrics_host: expected a metrics_port with it, got '::' alone"):
        ServerConfig(metrics_host="::")
    assert ServerConfig(metrics_host="0.0.0.0", metrics_port=0).metrics_host == "0.0.0.0"


@pytest.mark.parametrize("name", ["host", "metrics_host"])
def test_an_empty_address_is_refused(name: str) -> None:
    """It was any address, which the warning that there are no keys did not say."""
    with pytest.raises(ValueError, match=f"{name}: expected an address, got ''"):
        ServerConfig(**{name: ""}, metrics_port=0)


def test_connections_notice_that_the_other_end_is_gone() -> None:
    with tcp_listener("127.0.0.1", 0) as listener:
        listener.listen()
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 10
