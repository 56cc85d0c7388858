"""HTTP/1.1 on Hypercorn's H11Protocol: no WebSockets, a close that nothing can interrupt half-way, and cheap chunks."""

from __future__ import annotations

from typing import Protocol, cast

import h11
from hypercorn.events import Closed, RawData, Updated
from hypercorn.protocol.events import Body, Event, Request, Response, StreamClosed
from hypercorn.protocol.h11 import STREAM_ID, H11Protocol
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.typing import TaskGroup

from llamatrio.server.direct import DirectTasks


class Wire(Protocol):
    """The connection below, for bytes that go out without waiting."""

    @property
    def is_free(self) -> bool:
        """Nobody is writing, and nothing is left over."""
        ...

    def write_now(self, data: bytes) -> bool:
        """Writes what the socket takes and keeps the rest for the next write; False if there is a rest."""
        ...


class Http1(H11Protocol):
    """One HTTP/1.1 connection."""

    stall_timeout: float
    """Unused here: each write has the connection's own time limit."""
    wire: Wire

    _is_chunked = False
    """The body of the response under way goes out in chunks (RFC 9112, 7.1)."""
    _may_chunk = False
    """The request under way leaves chunks to the response: it is of HTTP/1.1 and asks for a body."""

    @property
    def has_unread_request(self) -> bool:
        """Whether the peer is still sending a request that we will not read to the end."""
        return self.connection.their_state in (h11.SEND_BODY, h11.ERROR)

    async def stream_send(self, event: Event) -> None:
        if isinstance(event, Body) and self._is_amid_chunks:
            # A chunk changes nothing of h11's state, so it need not pass through it; streams are made of these.
            if event.data:
                await self.send(RawData(_chunk(event.data)))
            return
        if isinstance(event, Response) and event.status_code >= 200:
            self._is_chunked = self._takes_chunks(event)
            if self._must_close():
                headers = [*event.headers, (b"connection", b"close")]
                event = Response(stream_id=event.stream_id, headers=headers, status_code=event.status_code)
        await super().stream_send(event)

    # --- Direct: this connection has one stream at a time ---

    def can_take(self) -> bool:
        return self._is_amid_chunks and self.wire.is_free

    def take(self, data: bytes) -> bool:
        return self.wire.write_now(_chunk(data))

    async def drained(self) -> None:
        await self.send(RawData(b""))

    @property
    def _is_amid_chunks(self) -> bool:
        return self._is_chunked and self.connection.our_state is h11.SEND_BODY

    def _takes_chunks(self, response: Response) -> bool:
        """Whether h11 frames the body in chunks (RFC 9112, 6.3)."""
        if not self._may_chunk or response.status_code in (204, 304):
            return False
        return all(name.lower() != b"content-length" for name, _ in response.headers)

    def _must_close(self) -> bool:
        # Said in time: a client that is not told uses the connection again, and finds it closed.
        return self.connection.their_state is h11.SEND_BODY or self.context.terminated.is_set()

    async def _create_stream(self, request: h11.Request) -> None:
        # An Upgrade to WebSocket is ignored, as RFC 9110 allows: the request is answered as plain HTTP.
        if not is_servable_target(request.target):
            await self._send_error_response(400)
            await self.send(Closed())
            return
        self._may_chunk = request.http_version == b"1.1" and request.method.upper() != b"HEAD"
        self.stream = HTTPStream(
            self.app,
            self.config,
            self.context,
            cast(TaskGroup, DirectTasks(self.task_group, self)),
            self.ssl,
            self.client,
            self.server,
            self.stream_send,
            STREAM_ID,
        )
        await self.stream.handle(
            Request(
                stream_id=STREAM_ID,
                headers=list(request.headers),
                http_version=request.http_version.decode(),
                method=request.method.decode("ascii").upper(),
                raw_path=request.target,
                state=self.connection_state,
            )
        )

    async def _maybe_recycle(self) -> None:
        # Runs in the app's task, which is cancelled once its stream hears StreamClosed: that comes last.
        stream, self.stream = self.stream, None
        await self._next_cycle()
        if stream is not None:
            await stream.handle(StreamClosed(stream_id=STREAM_ID))

    async def _next_cycle(self) -> None:
        """Never waits: what it awaits are Hypercorn's async setters and rule 3's callbacks."""
        both_done = self.connection.our_state is h11.DONE and self.connection.their_state is h11.DONE
        if both_done and not self.context.terminated.is_set():
            self.connection.start_next_cycle()
            await self.can_read.set()
            await self.send(Updated(idle=True))
        else:
            await self.can_read.set()
            await self.send(Closed())


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def is_servable_target(target: bytes) -> bool:
    """Whether a request target has a path: origin form, absolute form, or the asterisk of OPTIONS."""
    return target.isascii() and (target.startswith((b"/", b"http://", b"https://")) or target == b"*")
