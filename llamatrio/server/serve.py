"""Serves an ASGI app under Trio: listeners, connections, and an orderly end.

Shutdown: listeners close, idle connections close, streams go on for `grace` seconds at most, and what is left
then is cut. The engine is opened outside of `serve`, so it outlives every stream:

    async with open_engine(...) as engine:
        await serve(create_app(engine, settings), settings, shutdown)
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Awaitable, Callable
from ssl import SSLContext
from typing import TypeAlias

import trio
from hypercorn.config import Config
from hypercorn.trio.lifespan import Lifespan
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import AppWrapper, ASGIFramework
from hypercorn.utils import repr_socket_addr, wrap_app

from llamatrio.server.hypercorn_guard import Connection, SocketStream
from llamatrio.server.settings import ServerConfig

Listener: TypeAlias = "trio.SocketListener | trio.SSLListener[trio.SocketStream]"

_log = logging.getLogger("llamatrio.http")


async def serve(
    app: ASGIFramework,
    settings: ServerConfig,
    shutdown: trio.Event,
    *,
    task_status: trio.TaskStatus[tuple[str, ...]] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Serves `app` until `shutdown` is set and its streams have ended.

    Reports the URLs listened on through `task_status`. Raises OSError when an address cannot be bound, and
    ssl.SSLError or OSError when the certificate or its key cannot be read.
    """
    config = hypercorn_config(settings)
    asgi = wrap_app(app, config.wsgi_max_body_size, "asgi")
    tls = config.create_ssl_context()
    listeners = await _open_listeners(settings)
    lifespan = Lifespan(asgi, config, {})
    async with trio.open_nursery() as lifespan_nursery:
        await lifespan_nursery.start(lifespan.handle_lifespan)
        await lifespan.wait_for_startup()
        urls = tuple(_url(listener, "https" if tls else "http") for listener in listeners)
        for url in urls:
            _log.info("listening on %s", url)
        task_status.started(urls)
        await _Server(asgi, config, settings).run(_with_tls(listeners, tls), shutdown)
        await lifespan.wait_for_shutdown()
        lifespan_nursery.cancel_scope.cancel()


async def until_signalled(run: Callable[[trio.Event], Awaitable[None]]) -> None:
    """Runs `run(shutdown)`, where SIGTERM or SIGINT sets `shutdown` and a second signal cancels.

    What `run` raises comes out as it is, not in a group.

        await until_signalled(lambda shutdown: serve(app, settings, shutdown))
    """
    shutdown = trio.Event()
    failure: Exception | None = None
    async with trio.open_nursery() as nursery:
        await nursery.start(watch_signals, shutdown, nursery.cancel_scope)
        try:
            await run(shutdown)
        except Exception as error:
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def watch_signals(
    shutdown: trio.Event,
    scope: trio.CancelScope,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Sets `shutdown` at the first SIGTERM or SIGINT and cancels `scope` at the second."""
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for number in signals:
            if shutdown.is_set():
                scope.cancel()
            _log.info("%s: finishing the streams that are open", signal.Signals(number).name)
            shutdown.set()


def hypercorn_config(settings: ServerConfig) -> Config:
    """The Hypercorn settings that its protocol classes read."""
    config = Config()
    config.certfile = settings.ssl_cert_file
    config.keyfile = settings.ssl_key_file
    config.accesslog = None
    config.errorlog = _log
    config.include_server_header = False
    config.keep_alive_timeout = settings.keep_alive
    config.keep_alive_max_requests = sys.maxsize  # past it Hypercorn would close a connection under live streams
    config.ssl_handshake_timeout = settings.handshake_timeout
    config.h2_max_concurrent_streams = settings.max_streams
    return config


class _Server:
    """The connections of one `serve`. Owned by its task."""

    def __init__(self, app: AppWrapper, config: Config, settings: ServerConfig) -> None:
        self._app = app
        self._config = config
        self._settings = settings
        self._context = WorkerContext(None)
        self._connections: set[Connection] = set()

    async def run(self, listeners: list[Listener], shutdown: trio.Event) -> None:
        async with trio.open_nursery() as connections:
            async with trio.open_nursery() as accepting:
                accepting.start_soon(self._accept, listeners, connections)
                await shutdown.wait()
                accepting.cancel_scope.cancel()
            await self._context.terminated.set()
            for connection in tuple(self._connections):
                connection.begin_shutdown()
            connections.cancel_scope.deadline = trio.current_time() + self._settings.grace

    async def _accept(self, listeners: list[Listener], nursery: trio.Nursery) -> None:
        await trio.serve_listeners(self._handle, listeners, handler_nursery=nursery)

    async def _handle(self, stream: SocketStream) -> None:
        connection = Connection(self._app, self._config, self._context, stream, self._settings.write_timeout)
        self._connections.add(connection)
        try:
            await connection.run()
        finally:
            self._connections.discard(connection)


async def _open_listeners(settings: ServerConfig) -> list[trio.SocketListener]:
    listeners: list[trio.SocketListener] = []
    for host in settings.host.split(","):
        try:
            listeners += await trio.open_tcp_listeners(settings.port, host=host or None, backlog=settings.backlog)
        except OSError as error:
            for listener in listeners:
                listener.socket.close()
            raise OSError(error.errno, f"cannot listen on {host}:{settings.port}: {error.strerror}") from error
    return listeners


def _with_tls(listeners: list[trio.SocketListener], tls: SSLContext | None) -> list[Listener]:
    if tls is None:
        return list(listeners)
    return [trio.SSLListener(listener, tls, https_compatible=True) for listener in listeners]


def _url(listener: trio.SocketListener, scheme: str) -> str:
    socket = listener.socket
    return f"{scheme}://{repr_socket_addr(socket.family, socket.getsockname())}"
