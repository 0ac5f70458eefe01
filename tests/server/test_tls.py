"""HTTPS, and clients that connect and never begin to encrypt."""

from __future__ import annotations

import asyncio
import datetime
import ssl
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from starlette.types import Receive, Scope, Send
from support.in_process_server import idle_model
from support.time_limit import HANGING

from radixkv.server.access.tenants import Tenants
from radixkv.server.config import ServerConfig
from radixkv.server.run import serve
from radixkv.server.transport.listener import address_of, listener_for
from radixkv.server.transport.tls import tls_context

PASSWORD = "the password"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate with its key, which is encrypted, in the same file."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name.from_rfc4514_string("CN=server")
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now)
    signed = builder.not_valid_after(now + datetime.timedelta(days=1)).sign(key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(PASSWORD.encode())
    )
    path = tmp_path_factory.mktemp("tls") / "certificate.pem"
    path.write_bytes(private + signed.public_bytes(pem))
    return path


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """An application that answers with what was sent, and how."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["scheme"].encode() + b" " + body})


# Ray's processes may have asyncio's event loop.
@pytest.mark.parametrize("make_loop", [uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def test_a_connection_without_encryption_is_closed_for_another(
    certificate: Path, make_loop: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They used to count nowhere: each held a file descriptor for a minute, until there was none for other clients."""
    monkeypatch.setattr("radixkv.server.run.possible_connections", lambda: 3)
    llm = idle_model()
    config, tenants = ServerConfig(port=0, ssl_certfile=certificate, ssl_keyfile_password=PASSWORD), Tenants()

    async def main() -> None:
        drain = asyncio.Event()
        with listener_for(config, tenants) as listener:
            serving = asyncio.ensure_future(serve(llm, config, "it", echo, listener, drain=drain))
            host, port = listener.getsockname()

            async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
                while True:
                    try:
                        return await asyncio.open_connection(host, port)
                    except ConnectionRefusedError:
                        await asyncio.sleep(0)  # it does not listen yet

            async with asyncio.timeout(HANGING), httpx.AsyncClient(verify=False, timeout=HANGING) as client:
                silent = [await connect() for _ in range(5)]
                for reader, _ in silent[:2]:
                    with suppress(ConnectionResetError):
                        assert await reader.read() == b""
                url, body = address_of(listener, encrypted=True), "x" * 100_000
                assert (await client.post(url, content=body)).text == f"https {body}"
                # A connection that does not speak TLS is closed, and no longer counted.
                reader, writer = silent[4]
                writer.write(b"GET / HTTP/1.1\r\n\r\n")
                with suppress(ConnectionResetError):
                    assert not (await reader.read()).startswith(b"HTTP")
                assert (await client.post(url, content=body)).text == f"https {body}"
            for _, writer in silent:
                writer.close()
            drain.set()
            assert await serving == 0

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(main())


def test_clients_may_need_a_certificate_of_their_own(certificate: Path) -> None:
    """Not over a socket: a handshake in memory."""
    config = ServerConfig(
        ssl_certfile=certificate, ssl_keyfile_password=PASSWORD, ssl_ca_certs=certificate, ssl_ciphers="ECDHE+AESGCM"
    )
    context = tls_context(config)
    assert context is not None

    def let_in(client: ssl.SSLContext) -> bool:
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = [client.wrap_bio(to_client, to_server), context.wrap_bio(to_server, to_client, server_side=True)]
        for _ in range(4):
            for end in ends:
                try:
                    end.do_handshake()
                except ssl.SSLWantReadError:
                    continue
                except ssl.SSLError:
                    return False
        return True

    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    assert not let_in(client)
    client.load_cert_chain(certificate, password=PASSWORD)
    assert let_in(client)
    assert tls_context(ServerConfig()) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ssl_keyfile_password": "wrong"}, "ssl_certfile: .* with ssl_keyfile None cannot be used"),
        ({"ssl_keyfile_password": None}, "ssl_certfile: .* with ssl_keyfile None cannot be used"),
        ({"ssl_ca_certs": "/no/such/file"}, "ssl_ca_certs: /no/such/file cannot be used"),
        ({"ssl_ciphers": "none such"}, "ssl_ciphers: 'none such' cannot be used"),
        ({"ssl_certfile": None}, "ssl_keyfile_password: expected an ssl_certfile with it"),
    ],
)
def test_what_cannot_be_used_is_named(certificate: Path, options: dict[str, Any], message: str) -> None:
    fields = {"ssl_certfile": certificate, "ssl_keyfile_password": PASSWORD}
    with pytest.raises(ValueError, match=message):
        tls_context(ServerConfig(**fields | options))
