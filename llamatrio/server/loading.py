"""Answers while the model loads: the port is open at once, and clients are told to come back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import trio
from quart_trio import QuartTrio
from werkzeug.datastructures import Headers

from llamatrio.errors import OverloadedError
from llamatrio.server.app import create_app
from llamatrio.server.auth import origin_headers, preflight_headers
from llamatrio.server.failures import error_body
from llamatrio.server.ports import Engine
from llamatrio.server.serve import serve
from llamatrio.server.settings import CorsConfig, ServerConfig
from llamatrio.server.stream import to_json

_LOADING = to_json(error_body(OverloadedError("Loading model")))
_HEADERS = {"content-type": "application/json; charset=utf-8", "retry-after": "1"}


class LoadingGate:
    """An ASGI app that answers 503, and preflights, until it is given the app to pass requests to."""

    def __init__(self, cors: CorsConfig) -> None:
        self.app: QuartTrio | None = None
        self._cors = cors

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif self.app is not None:
            await self.app(scope, receive, send)
        else:
            await self._answer(scope, send)

    async def _answer(self, scope: Any, send: Any) -> None:
        asked = Headers([(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]])
        if scope.get("method") == "OPTIONS":
            status, headers, body = 204, preflight_headers(self._cors, asked), b""
        else:
            status, headers, body = 503, {**_HEADERS, "content-length": str(len(_LOADING))}, _LOADING
        headers |= origin_headers(self._cors, asked)  # a page on another origin learns that the model loads
        encoded = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": encoded})
        await send({"type": "http.response.body", "body": body, "more_body": False})


async def _live(receive: Any, send: Any) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


async def serve_while_loading(
    opening: AbstractAsyncContextManager[Engine],
    settings: ServerConfig,
    shutdown: trio.Event,
    *,
    new_app: Callable[[Engine, ServerConfig], QuartTrio] = create_app,
    task_status: trio.TaskStatus[tuple[str, ...]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Listens first, then opens the engine, and serves it until `shutdown`.

    The engine is closed after the last stream has ended. A shutdown during loading abandons it at the next
    checkpoint.

    Raises what `opening` or the engine raises, as it is, after the server has ended at once; OSError when the
    address cannot be bound.
    """
    gate = LoadingGate(settings.cors)
    served = trio.Event()
    failure: Exception | None = None

    async def run(*, task_status: trio.TaskStatus[tuple[str, ...]]) -> None:
        await serve(gate, settings, shutdown, task_status=task_status)
        served.set()
        if gate.app is None:
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        try:
            urls = await nursery.start(run)
            async with opening as engine:
                gate.app = new_app(engine, settings)
                task_status.started(urls)
                await served.wait()
        except Exception as error:
            failure = error
            nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
