"""HTTP/2 on Hypercorn's H2Protocol: back-pressure for each stream, and one writer for the connection.

Apps put bytes into their stream's outbox and set `_wake`. The writer moves what flow control allows from all
outboxes into h2, first come, first served, and sends the lot in one write. So the events that one decode step
makes for all streams of a connection leave in one packet, no app's task ever touches the socket, and cancelling
an app leaves the connection whole.

Bounds: an outbox takes HIGH_WATER bytes, then its app waits, at most `stall_timeout`; then the stream is reset.
A write takes MAX_WRITE bytes. A peer that sends and does not read (a flood of PING, say) is not read from while
a write is blocked. The priority tree is not used: RFC 9113 deprecates it, and peers could overflow it.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, cast

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings
import trio
from h2.errors import ErrorCodes
from h2.settings import SettingCodes
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.events import Body, EndBody, InformationalResponse, Request, Response, StreamClosed
from hypercorn.protocol.events import Event as StreamEvent
from hypercorn.protocol.h2 import H2Protocol
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.typing import TaskGroup
from hypercorn.utils import filter_pseudo_headers

from llamatrio.server.direct import DirectTasks
from llamatrio.server.h2_data import send_data
from llamatrio.server.http1_guard import is_servable_target
from llamatrio.server.outbox import HIGH_WATER, Outbox

MAX_WRITE = 1 << 18


class Http2(H2Protocol):
    """One HTTP/2 connection. `streams` and `_outboxes` are keyed by stream id."""

    stall_timeout: float
    """Seconds that a stream may wait for its peer to take more."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.connection.local_settings = h2.settings.Settings(
            client=False,
            initial_values={
                SettingCodes.MAX_CONCURRENT_STREAMS: self.config.h2_max_concurrent_streams,
                SettingCodes.MAX_HEADER_LIST_SIZE: self.config.h2_max_header_list_size,
            },
        )
        self._outboxes: dict[int, Outbox] = {}
        self._ready: dict[int, None] = {}
        """Ids whose outbox may have something to send, in order of arrival."""
        self._wake = trio.Event()
        self._wire = trio.Lock()
        self._is_ending = False

    # --- the connection's side: the reader's task ---

    async def initiate(self, headers: list[tuple[bytes, bytes]] | None = None, settings: bytes | None = None) -> None:
        """Sends the preface; with `headers`, serves the request of an h2c Upgrade as stream 1."""
        if settings is None:
            self.connection.initiate_connection()
        else:
            self.connection.initiate_upgrade_connection(settings)
        self.task_group.spawn(self.send_task)
        self._wake.set()
        if headers is not None:
            await self._create_stream(h2.events.RequestReceived(stream_id=1, headers=headers))
            await self._end_request(1)

    async def handle(self, event: Event) -> None:
        """Takes bytes from the peer."""
        assert isinstance(event, RawData)
        try:
            events = self.connection.receive_data(event.data)
        except h2.exceptions.ProtocolError:
            self._end()  # h2 has made the GOAWAY that says why
            return
        for item in events:
            await self._handle_event(item)
        self._wake.set()
        async with self._wire:
            pass

    async def _handle_event(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.DataReceived():
                await self._receive_body(event)
            case h2.events.WindowUpdated():
                self._window_opened(event.stream_id)
            case h2.events.RequestReceived():
                await self._receive_request(event)
            case h2.events.StreamEnded():
                await self._end_request(event.stream_id)
            case h2.events.StreamReset():
                self._drop_outbox(event.stream_id)
                await self._close_stream(event.stream_id)
            case h2.events.RemoteSettingsChanged():
                self._window_opened(0)
            case h2.events.ConnectionTerminated():
                self._end()

    async def _receive_request(self, event: h2.events.RequestReceived) -> None:
        if self.context.terminated.is_set():
            self._reset(event.stream_id, ErrorCodes.REFUSED_STREAM)
        else:
            await self._create_stream(event)

    async def _create_stream(self, event: h2.events.RequestReceived) -> None:
        pseudo = dict(event.headers)
        method, path = pseudo.get(b":method", b""), pseudo.get(b":path", b"")
        if method == b"CONNECT" or not method.isascii() or not is_servable_target(path):
            self._reset(event.stream_id, ErrorCodes.PROTOCOL_ERROR)
            return
        self._outboxes[event.stream_id] = Outbox()
        stream = self.streams[event.stream_id] = HTTPStream(
            self.app,
            self.config,
            self.context,
            cast(TaskGroup, DirectTasks(self.task_group, _DirectStream(self, event.stream_id))),
            self.ssl,
            self.client,
            self.server,
            self.stream_send,
            event.stream_id,
        )
        await self.send(Updated(idle=False))
        await stream.handle(
            Request(
                stream_id=event.stream_id,
                headers=filter_pseudo_headers(event.headers),
                http_version="2",
                method=method.decode("ascii").upper(),
                raw_path=path,
                state=self.connection_state,
            )
        )

    async def _receive_body(self, event: h2.events.DataReceived) -> None:
        stream = self.streams.get(event.stream_id)
        if stream is not None:
            await stream.handle(Body(stream_id=event.stream_id, data=event.data))
        # A body that goes on after its response is dropped, but the connection's window must not shrink by it.
        with suppress(h2.exceptions.StreamClosedError):
            self.connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)

    async def _end_request(self, stream_id: int) -> None:
        stream = self.streams.get(stream_id)
        if stream is not None:
            await stream.handle(EndBody(stream_id=stream_id))

    def _window_opened(self, stream_id: int | None) -> None:
        if stream_id:
            self._ready[stream_id] = None
        else:
            self._ready.update(dict.fromkeys(self._outboxes))

    # --- the apps' side: each in its own task ---

    async def stream_send(self, event: StreamEvent) -> None:
        """What an app's stream calls. A stream that has died takes everything and does nothing."""
        if isinstance(event, StreamClosed):
            await self._app_ended(event.stream_id)
            return
        outbox = self._outboxes.get(event.stream_id)
        if outbox is None or outbox.is_complete:
            await trio.lowlevel.checkpoint()  # or a busy app would never notice that it is cancelled
        elif isinstance(event, Body):
            if not self.take(event.stream_id, event.data):
                await self._wait_for_room(event.stream_id, outbox)
        elif isinstance(event, EndBody):
            outbox.is_complete = True
            self._announce(event.stream_id)
            await self._wait_until_sent(event.stream_id, outbox)
        elif isinstance(event, Response | InformationalResponse):
            self._send_headers(event)

    def _send_headers(self, event: Response | InformationalResponse) -> None:
        headers = [
            (b":status", b"%d" % event.status_code),
            *event.headers,
            *self.config.response_headers("h2"),
        ]
        try:
            self.connection.send_headers(event.stream_id, headers)
        except h2.exceptions.ProtocolError:
            self._drop_outbox(event.stream_id)
        self._wake.set()

    def can_take(self, stream_id: int) -> bool:
        """Whether the stream's body is open."""
        outbox = self._outboxes.get(stream_id)
        return outbox is not None and not outbox.is_complete

    def take(self, stream_id: int, data: bytes) -> bool:
        """Takes a piece of the stream's body; False when its outbox is full."""
        outbox = self._outboxes[stream_id]
        outbox.data += data
        self._announce(stream_id)
        return len(outbox.data) < HIGH_WATER

    async def drained(self, stream_id: int) -> None:
        """Waits until the stream's outbox has room."""
        if (outbox := self._outboxes.get(stream_id)) is not None:
            await self._wait_for_room(stream_id, outbox)

    async def _wait_for_room(self, stream_id: int, outbox: Outbox) -> None:
        with trio.move_on_after(self.stall_timeout) as patience:
            await outbox.room()
        if patience.cancelled_caught:
            await self._give_up(stream_id)

    async def _wait_until_sent(self, stream_id: int, outbox: Outbox) -> None:
        with trio.move_on_after(self.stall_timeout) as patience:
            await outbox.closed()
        if patience.cancelled_caught:
            await self._give_up(stream_id)

    async def _give_up(self, stream_id: int) -> None:
        self._reset(stream_id, ErrorCodes.CANCEL)
        await self._close_stream(stream_id)

    async def _app_ended(self, stream_id: int) -> None:
        if stream_id in self._outboxes:
            # The app failed before the end of its response: say so, or the peer waits for ever.
            self._reset(stream_id, ErrorCodes.INTERNAL_ERROR)
        await self._close_stream(stream_id)

    async def _close_stream(self, stream_id: int) -> None:
        stream = self.streams.pop(stream_id, None)
        if not self.streams:
            if self.context.terminated.is_set():
                self.say_goodbye()
            else:
                await self.send(Updated(idle=True))
        if stream is not None:
            # Last: the app's task, which this may be, is cancelled from here on.
            await stream.handle(StreamClosed(stream_id=stream_id))

    # --- the writer ---

    async def send_task(self) -> None:
        """Writes what is ready, until the connection ends."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            is_last = self._is_ending  # read before the write: the end may come while it goes on
            if not is_last:
                self._pack()
            data = self.connection.data_to_send()
            if data:
                async with self._wire:
                    await self.send(RawData(data=data))
            if is_last:
                await self.send(Closed())
                return

    def say_goodbye(self) -> None:
        """Ends an idle connection with GOAWAY."""
        if not self._is_ending:
            self.connection.close_connection()
            self._end()

    def _end(self) -> None:
        self._is_ending = True
        self._wake.set()

    def _pack(self) -> None:
        """Moves what the windows allow into h2's output, one frame a turn for each stream."""
        room = MAX_WRITE
        while self._ready:
            if room <= 0:
                self._wake.set()
                return
            stream_id = next(iter(self._ready))
            del self._ready[stream_id]
            outbox = self._outboxes.get(stream_id)
            if outbox is not None:
                room -= self._pack_frame(stream_id, outbox)

    def _pack_frame(self, stream_id: int, outbox: Outbox) -> int:
        try:
            window = self.connection.local_flow_control_window(stream_id)
            size = max(0, min(len(outbox.data), window, self.connection.max_outbound_frame_size))
            is_last = outbox.is_complete and size == len(outbox.data)
            if size or is_last:
                send_data(self.connection, stream_id, outbox.take(size), end_stream=is_last)
        except (h2.exceptions.ProtocolError, KeyError):
            self._drop_outbox(stream_id)  # reset by the peer while the bytes waited
            return 0
        if is_last:
            self._drop_outbox(stream_id)
        elif outbox.data and window > size:
            self._ready[stream_id] = None
        return size

    def _announce(self, stream_id: int) -> None:
        self._ready[stream_id] = None
        self._wake.set()

    def _drop_outbox(self, stream_id: int) -> None:
        outbox = self._outboxes.pop(stream_id, None)
        if outbox is not None:
            outbox.close()

    def _reset(self, stream_id: int, code: ErrorCodes) -> None:
        self._drop_outbox(stream_id)
        with suppress(h2.exceptions.ProtocolError):  # closed already
            self.connection.reset_stream(stream_id, code)
        self._wake.set()


class _DirectStream:
    """One stream's `Direct`."""

    def __init__(self, http2: Http2, stream_id: int) -> None:
        self._http2 = http2
        self._stream_id = stream_id

    def can_take(self) -> bool:
        return self._http2.can_take(self._stream_id)

    def take(self, data: bytes) -> bool:
        return self._http2.take(self._stream_id, data)

    async def drained(self) -> None:
        await self._http2.drained(self._stream_id)
