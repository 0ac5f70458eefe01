"""Hands a port over to a successor, which listens there already, without resetting a connection.

A socket that stops listening resets connections that the server has not accepted yet, and an idle connection may be closed
while a request is on its way. So::

    answers say "connection: close"     clients reconnect, to either server
    nothing is left to accept           no new connection reaches this server
    for a while                         connections that have had no such answer yet get one
    the server shuts down               running requests finish
"""

from __future__ import annotations

import asyncio
import select
import socket

import uvicorn
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Within this time, clients that send one request after the other get an answer by which they reconnect.
_SECONDS_TO_MOVE = 2.0
_SECONDS_BETWEEN_LOOKS = 0.02


class Handover:
    """The application of a server that can be succeeded."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_last(message: Message) -> None:
            if self._begun and message["type"] == "http.response.start":
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        await self._app(scope, receive, send_last)

    async def begin(self, server: uvicorn.Server, listener: socket.socket) -> None:
        """Stop listening; returns when the server may exit.

        Args:
            server: that serves this application.
            listener: its only socket, of which another process has a counterpart (`SO_REUSEPORT`).
        """
        self._begun = True
        loop = asyncio.get_running_loop()
        until = loop.time() + _SECONDS_TO_MOVE
        arrivals = select.poll()
        arrivals.register(listener, select.POLLIN)
        while arrivals.poll(0) and loop.time() < until:
            await asyncio.sleep(0)  # lets the loop accept connections
        # At once: before the loop closes the socket itself, another connection may come.
        listener.shutdown(socket.SHUT_RD)
        for listening in server.servers:
            listening.close()
        await asyncio.sleep(_SECONDS_BETWEEN_LOOKS)  # until the last accepted connections are counted
        while server.server_state.connections and loop.time() < until:
            await asyncio.sleep(_SECONDS_BETWEEN_LOOKS)
