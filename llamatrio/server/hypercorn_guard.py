"""Hosts Hypercorn's HTTP protocols so that no peer can harm another.

Hypercorn 0.18 brings the protocol logic (h11 and h2 glue, the ASGI stream, lifespan). Its Trio worker is not
used: there, one bad connection stops the server. `Connection` takes the worker's place; `http1_guard` and
`http2_guard` adapt the two protocols to it.

Rule 1. A connection is an island. Whatever goes wrong in it ends it, is logged here, and never reaches the
        server's nursery.
Rule 2. Bytes taken from h11 or h2 reach the wire whole and in order, or the connection ends: a write that fails,
        is cancelled or times out calls `abort`, which is synchronous and so always runs.
Rule 3. `protocol_send(Updated)` and `protocol_send(Closed)` never await. Quart-Trio cancels the app's task as soon
        as that task's stream is closed, so whatever stands behind an await there may never run.
Rule 4. The connection ends by leaving `_reading`: at the peer's end of file, on a request to close, or when the
        idle deadline passes. Leaving cancels the app tasks; no message to them has to get through.
Rule 5. An app that ended without reading its request closes its message channel, so the reader, which serves all
        streams of the connection, is never held up by it.

We lean on how these classes work inside, so the version is checked; tests/server/test_hostile_clients.py names
each behaviour.
"""

from __future__ import annotations

import binascii
import logging
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from importlib.metadata import version
from typing import Any, TypeAlias, TypeVar

import h2.exceptions
import trio
from hypercorn.config import Config
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.h11 import H2CProtocolRequiredError, H2ProtocolAssumedError
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import AppWrapper, ConnectionState
from hypercorn.utils import parse_socket_addr

from llamatrio.server.http1_guard import Http1
from llamatrio.server.http2_guard import Http2

if not version("hypercorn").startswith("0.18."):
    raise ImportError(f"llamatrio was checked with Hypercorn 0.18, not {version('hypercorn')}")

SocketStream: TypeAlias = "trio.SocketStream | trio.SSLStream[trio.SocketStream]"

P = TypeVar("P", Http1, Http2)

MAX_RECV = 1 << 16
CLOSE_SECONDS = 1.0
"""How long a polite close may take: TLS's close_notify, and draining a request body that nobody wants."""

_log = logging.getLogger("llamatrio.http")


class AppTasks(TaskGroup):
    """The tasks of one connection: one for each request, and HTTP/2's writer."""

    _nursery: trio.Nursery

    async def spawn_app(
        self, app: AppWrapper, config: Config, scope: Any, send: Callable[[Any], Awaitable[None]]
    ) -> Callable[[Any], Awaitable[None]]:
        """Starts the app on a request; returns the function that delivers ASGI messages to it."""
        inbox, messages = trio.open_memory_channel[Any](config.max_app_queue_size)
        self._nursery.start_soon(self._run_app, app, scope, messages, send)

        async def deliver(message: Any) -> None:
            with suppress(trio.BrokenResourceError):
                await inbox.send(message)

        return deliver

    async def _run_app(
        self,
        app: AppWrapper,
        scope: Any,
        messages: trio.MemoryReceiveChannel[Any],
        send: Callable[[Any], Awaitable[None]],
    ) -> None:
        with messages:
            try:
                await app(scope, messages.receive, send, trio.to_thread.run_sync, trio.from_thread.run)
            except* Exception as group:
                _log.error("the app failed on %s %s", scope["method"], scope["path"], exc_info=group)
        await send(None)

    def cancel(self) -> None:
        """Ends all tasks of the connection."""
        self._nursery.cancel_scope.cancel()


class Connection:
    """One client connection, from accept to close. Owned by its task in the server's nursery."""

    def __init__(
        self, app: AppWrapper, config: Config, context: WorkerContext, stream: SocketStream, write_timeout: float
    ) -> None:
        self.app = app
        self.config = config
        self.context = context
        self.stream = stream
        self.write_timeout = write_timeout
        self.protocol: Http1 | Http2 | None = None
        self._socket = _transport(stream).socket
        self._is_plain = isinstance(stream, trio.SocketStream) and os.name == "posix"
        """Whether bytes for the wire may be written to the socket's descriptor."""
        self._reading = trio.CancelScope()
        self._write_lock = trio.Lock()
        self._unsent = b""
        """What `write_now` could not write: goes out first with the next write."""
        self._is_idle = True
        self._is_dead = False

    async def run(self) -> None:
        """Serves the connection; returns when it has ended, for whatever reason."""
        try:
            await self._serve()
            await self._close()
        except* (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            pass  # the peer has gone
        except* Exception as group:
            _log.error("connection dropped", exc_info=group)
        finally:
            self.abort()

    def begin_shutdown(self) -> None:
        """Ends the connection if it is idle; a busy one ends after its last response (`context.terminated` is set)."""
        if self._is_idle:
            if isinstance(self.protocol, Http2):
                self.protocol.say_goodbye()
            else:
                self._reading.cancel()

    def abort(self) -> None:
        """Ends the connection at once. Wakes whoever waits for its socket."""
        self._is_dead = True
        self._socket.close()
        self._reading.cancel()

    async def protocol_send(self, event: Event) -> None:
        """What the protocols call: bytes for the wire, or news about the connection's state (rule 3)."""
        if isinstance(event, RawData):
            await self._write(event.data)
        elif isinstance(event, Closed):
            self._reading.cancel()
        elif isinstance(event, Updated):
            self._set_idle(event.idle)

    def _set_idle(self, is_idle: bool) -> None:
        self._is_idle = is_idle
        self._reading.deadline = trio.current_time() + self.config.keep_alive_timeout if is_idle else float("inf")

    async def _serve(self) -> None:
        if self.context.terminated.is_set():
            return  # accepted in the very moment that the listeners closed
        tasks = AppTasks()
        async with tasks:
            with self._reading:
                self._set_idle(True)
                alpn = await self._handshake()
                self.protocol = self._new_protocol(Http2, tasks) if alpn == "h2" else self._new_protocol(Http1, tasks)
                await self.protocol.initiate()
                await self._read(tasks)
            tasks.cancel()

    async def _handshake(self) -> str | None:
        if not isinstance(self.stream, trio.SSLStream):
            return None
        try:
            with trio.fail_after(self.config.ssl_handshake_timeout):
                await self.stream.do_handshake()
        except trio.TooSlowError:
            raise trio.BrokenResourceError from None
        alpn: str | None = self.stream.selected_alpn_protocol()
        return alpn

    def _new_protocol(self, kind: type[P], tasks: AppTasks) -> P:
        protocol = kind(
            self.app,
            self.config,
            self.context,
            tasks,
            ConnectionState({}),
            isinstance(self.stream, trio.SSLStream),
            parse_socket_addr(self._socket.family, self._socket.getpeername()),
            parse_socket_addr(self._socket.family, self._socket.getsockname()),
            self.protocol_send,
        )
        protocol.stall_timeout = self.write_timeout
        if isinstance(protocol, Http1):
            protocol.wire = self
        return protocol

    async def _read(self, tasks: AppTasks) -> None:
        while data := await self.stream.receive_some(MAX_RECV):
            assert self.protocol is not None
            try:
                await self.protocol.handle(RawData(data=bytes(data)))
            except H2ProtocolAssumedError as switch:
                await self._switch_to_http2(tasks, switch.data)
            except H2CProtocolRequiredError as switch:
                await self._switch_to_http2(tasks, switch.data, switch.headers, switch.settings)

    async def _switch_to_http2(
        self,
        tasks: AppTasks,
        data: bytes,
        headers: list[tuple[bytes, bytes]] | None = None,
        settings: bytes | None = None,
    ) -> None:
        self.protocol = http2 = self._new_protocol(Http2, tasks)
        try:
            await http2.initiate(headers, settings)
        except (binascii.Error, h2.exceptions.ProtocolError):
            self._reading.cancel()  # HTTP2-Settings that are none
            return
        if data:
            await http2.handle(RawData(data=data))

    async def _write(self, data: bytes) -> None:
        if self._is_dead:
            await trio.lowlevel.checkpoint()
            return
        is_sent = False
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
            data, self._unsent = self._unsent + data, b""
            if rest := data[self._send_at_once(data) :]:
                with trio.move_on_after(self.write_timeout):
                    await self._send_in_turn(rest)
                    is_sent = True
            else:
                is_sent = True
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            if not is_sent:
                self.abort()

    @property
    def is_free(self) -> bool:
        """Nobody is writing, and nothing is left over: bytes for `write_now` follow those before."""
        return self._is_plain and not self._unsent and not self._write_lock.locked()

    def write_now(self, data: bytes) -> bool:
        """Writes what the socket takes and keeps the rest for the next write; False if there is a rest."""
        if self._is_dead:
            return True
        try:
            self._unsent = data[self._send_at_once(data) :]
        except OSError:
            self.abort()
        return not self._unsent

    def _send_at_once(self, data: bytes) -> int:
        """Bytes that the socket takes without waiting: nearly always all, and that needs no time limit and no turn."""
        if not self._is_plain or self._write_lock.locked():
            return 0
        try:
            return os.write(self._socket.fileno(), data)
        except BlockingIOError:
            return 0

    async def _send_in_turn(self, data: bytes) -> None:
        try:
            self._write_lock.acquire_nowait()  # the usual case, and it costs no checkpoint
        except trio.WouldBlock:
            await self._write_lock.acquire()
        try:
            await self.stream.send_all(data)
        finally:
            self._write_lock.release()

    async def _close(self) -> None:
        if self._is_dead:
            return
        with trio.move_on_after(CLOSE_SECONDS):
            if isinstance(self.protocol, Http1) and self.protocol.has_unread_request:
                await self._drain()
            await self.stream.aclose()

    async def _drain(self) -> None:
        # Closing a socket that holds unread bytes resets it, and the reset can overtake our last response.
        if isinstance(self.stream, trio.SocketStream):
            await self.stream.send_eof()
        while await self.stream.receive_some(MAX_RECV):
            pass


def _transport(stream: SocketStream) -> trio.SocketStream:
    return stream.transport_stream if isinstance(stream, trio.SSLStream) else stream
