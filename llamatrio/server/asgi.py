"""The life of one request under Quart: what it holds is released when it ends, and silent streams are kept alive."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from typing import Any, cast

import trio
from quart import Response, request
from quart_trio.asgi import TrioASGIHTTPConnection
from quart_trio.wrappers import TrioRequest

from llamatrio.server.direct import DIRECT, Direct, Outlet
from llamatrio.server.stream import CONTENT_TYPE, HEADERS, PING

Send = Callable[[Any], Awaitable[None]]


class HoldingRequest(TrioRequest):
    """A request that owns context managers until its answer has been sent or its client has left."""

    held: ExitStack


class StreamResponse(Response):
    """Server-sent events. A comment goes out when there was nothing to send for `ping_interval` seconds."""

    def __init__(self, body: AsyncIterator[bytes], outlet: Outlet, ping_interval: float) -> None:
        super().__init__(body, headers=HEADERS, content_type=CONTENT_TYPE)
        self.outlet = outlet
        self.ping_interval = ping_interval


class AsgiConnection(TrioASGIHTTPConnection):
    """One request. Held context managers exit with it, whichever way it ends.

    A generator alone cannot do that: a client that leaves before its first byte leaves a generator that never
    ran, and whose `with` block never will.
    """

    async def handle_request(  # type: ignore[override]  # quart-trio's own signature
        self, nursery: trio.Nursery, request: Any, send: Any
    ) -> None:
        with ExitStack() as request.held:
            await super().handle_request(nursery, request, send)

    async def _send_response(self, send: Any, response: Any) -> None:
        if isinstance(response, StreamResponse):
            response.outlet.open(cast("Direct | None", self.scope["extensions"].get(DIRECT)))
        if not isinstance(response, StreamResponse) or response.ping_interval <= 0:
            await super()._send_response(send, response)
            return
        wire = _Wire(send, response.outlet)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wire.ping_when_silent, response.ping_interval)
            await super()._send_response(wire.send, response)
            nursery.cancel_scope.cancel()


class _Wire:
    """An ASGI `send` that notes when it was last used, and whether the body is open."""

    def __init__(self, send: Send, outlet: Outlet) -> None:
        self._send = send
        self._outlet = outlet
        self._is_open = False

    async def send(self, message: Any) -> None:
        is_open = message.get("more_body", True)
        if not is_open:
            self._is_open = False
        await self._send(message)
        self._is_open = is_open
        self._outlet.sent_at = trio.current_time()

    async def ping_when_silent(self, interval: float) -> None:
        while True:
            await trio.sleep_until(self._outlet.sent_at + interval)
            if self._is_open and trio.current_time() >= self._outlet.sent_at + interval:
                await self.send({"type": "http.response.body", "body": PING, "more_body": True})
            elif not self._is_open:
                self._outlet.sent_at = trio.current_time()


def held_by_request() -> ExitStack:
    """Contexts that exit when the current request ends."""
    return cast(HoldingRequest, request).held


async def read_body() -> bytes:
    """The current request's body."""
    return await request.get_data(cache=True, as_text=False, parse_form_data=False)
