"""What shows the server's state may have a port of its own, in the same process and on the same event loop."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop
from support.in_process_server import idle_model
from support.time_limit import HANGING

from radixkv.server.access.tenants import Tenants
from radixkv.server.config import ServerConfig
from radixkv.server.middleware.cors import Cors
from radixkv.server.run import run_server, serve
from radixkv.server.transport.listener import address_of, listener_for, metrics_listener_for, tcp_listener
from radixkv.server.transport.ports import OnPort, Port, port_is_private, port_of


async def tell_port(scope: Any, receive: Any, send: Any) -> None:
    """An application that answers with the port on which it was asked."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": f"{port_of(scope).name} {port_is_private(scope)}".encode()})


@pytest.mark.parametrize("metrics_port", [None, 0])
def test_both_ports_are_served_until_the_end(metrics_port: int | None) -> None:
    llm, config, tenants = idle_model(), ServerConfig(port=0, metrics_port=metrics_port), Tenants()

    async def main() -> tuple[list[str], int]:
        drain = asyncio.Event()
        with listener_for(config, tenants) as first, metrics_listener_for(config, tenants, first) as second:
            listeners = [first] if second is None else [first, second]
            serving = asyncio.ensure_future(serve(llm, config, "it", tell_port, first, second, drain=drain))
            async with httpx.AsyncClient(timeout=HANGING) as client:
                addresses = [address_of(listener, encrypted=False) for listener in listeners]
                for address in addresses:
                    while True:
                        try:
                            await client.get(address)
                            break
                        except httpx.ConnectError:
                            await asyncio.sleep(0)  # it does not listen yet
                answers = [(await client.get(address)).text for address in addresses]
                drain.set()
                return answers, await serving

    assert asyncio.run(main()) == (["ONLY False"] if metrics_port is None else ["API True", "METRICS True"], 0)


@pytest.mark.parametrize("metrics_port", [None, 0])
def test_of_two_servers_that_started_on_one_port_the_second_ends(
    metrics_port: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both used to bind it while they loaded their models, and both said that they served."""
    llm, config, tenants = idle_model(), ServerConfig(port=0, metrics_port=metrics_port), Tenants()

    async def main() -> None:
        with listener_for(config, tenants) as first, metrics_listener_for(config, tenants, first) as second:
            host, port = (first if second is None else second).getsockname()
            with tcp_listener(host, port) as other:
                other.listen()
                with pytest.raises(OSError, match=f"cannot listen on {host}:{port}: Address already in use"):
                    await serve(llm, config, "it", tell_port, first, second, drain=asyncio.Event())

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
    assert capsys.readouterr().out == ""
    llm.shutdown.assert_awaited()


def test_pages_that_may_call_the_server_do_not_read_the_metrics() -> None:
    async def allowed_origin(port: Port) -> str | None:
        app = OnPort(Cors(tell_port, ["*"]), port, private=True)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            response = await client.get("/metrics", headers={"Origin": "https://app.example"})
            return response.headers.get("access-control-allow-origin")

    assert [asyncio.run(allowed_origin(port)) for port in (Port.ONLY, Port.API, Port.METRICS)] == ["*", "*", None]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metrics_port": 65536}, "metrics_port"),
        (
            {"metrics_port": 0, "metrics_host": "0.0.0.0"},
            "metrics_host: .* since there are no API keys; set metrics_key",
        ),
    ],
)
def test_a_server_whose_prompts_other_machines_could_see_does_not_start(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_server(ServerConfig(model="/no/such/model", port=0, **options), {})


def test_by_default_only_this_machine_reaches_a_metrics_port() -> None:
    tenants = Tenants(["key"])
    with listener_for(ServerConfig(host="0.0.0.0", port=0), tenants) as first:
        for config, host in (
            (ServerConfig(metrics_port=0), "127.0.0.1"),
            (ServerConfig(metrics_port=0, metrics_host="0.0.0.0"), "0.0.0.0"),
        ):
            with metrics_listener_for(config, tenants, first) as listener:
                assert listener is not None
                assert listener.getsockname()[0] == host


def test_metrics_have_a_port_of_their_own() -> None:
    """With "localhost" for the API, that was noticed only when the model was loaded and both sockets were to listen."""
    tenants = Tenants(["key"])
    for host, metrics_host in (
        ("127.0.0.1", "127.0.0.1"),
        ("localhost", "127.0.0.1"),
        ("0.0.0.0", "127.0.0.1"),
        ("127.0.0.1", "0.0.0.0"),
    ):
        with listener_for(ServerConfig(host=host, port=0), tenants) as first:
            port = first.getsockname()[1]
            config = ServerConfig(metrics_port=port, metrics_host=metrics_host)
            message = f"metrics_port: expected another port than that of the API, got {port}"
            with pytest.raises(ValueError, match=message), metrics_listener_for(config, tenants, first):
                pass


def test_metrics_may_have_the_port_of_the_api_on_another_address(tmp_path: Path) -> None:
    tenants = Tenants(["key"])
    with listener_for(ServerConfig(port=0), tenants) as first:
        port = first.getsockname()[1]
        config = ServerConfig(metrics_port=port, metrics_host="127.0.0.2")
        with metrics_listener_for(config, tenants, first) as second:
            assert second is not None
            assert second.getsockname() == ("127.0.0.2", port)
    with (
        listener_for(ServerConfig(uds=tmp_path / "socket"), tenants) as first,
        metrics_listener_for(ServerConfig(metrics_port=0), tenants, first) as second,
    ):
        assert second is not None
