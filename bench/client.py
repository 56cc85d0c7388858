"""A streaming client that leaves the processor to the server it measures.

One thread, plain sockets and a selector. Bytes are kept as they come, each piece with its time, and scanned when
somebody asks for what is in them; only the last event of an answer is parsed. The time is the kernel's, when the bytes
arrived (Linux): the server's threads may have all cores, and how long a client waits for one is not the server's doing.
Where several arrivals are read at once, all have the time of the last.
HTTP/1.1 takes one connection for each stream, HTTP/2 (prior knowledge) one for all.

    with Http1Client(port) as client:
        streams = [client.start(body) for body in bodies]
        client.wait_until(lambda: all(stream.is_done for stream in streams))
"""

from __future__ import annotations

import json
import selectors
import socket
import struct
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

import h2.config
import h2.connection
import h2.settings

from bench.sse import ChunkedBody, EventCounter

PATH = "/completion"
PATIENCE = 600.0
"""Seconds that a wait may last."""
WIDE = 2**31 - 1
READ_SIZE = 1 << 14
"""Small: Python allocates as much for every read, and from 128 KiB on the system maps fresh pages for it."""
_STAMPS = 35 if sys.platform == "linux" else None
"""SO_TIMESTAMPNS, which Python does not name, and the kind of message it brings."""
_TIMESPEC = struct.Struct("@qq")
_EPOCH = time.time() - time.perf_counter()


def _receive(sock: socket.socket) -> tuple[bytes, float]:
    """What has come, and when it came."""
    if _STAMPS is None:
        return sock.recv(READ_SIZE), time.perf_counter()
    data, messages, _, _ = sock.recvmsg(READ_SIZE, socket.CMSG_SPACE(_TIMESPEC.size))
    for level, kind, value in messages:
        if (level, kind) == (socket.SOL_SOCKET, _STAMPS):
            seconds, nanoseconds = _TIMESPEC.unpack(value)
            return data, seconds - _EPOCH + nanoseconds * 1e-9
    return data, time.perf_counter()


class Stream:
    """One answer as it came in. Times are of `time.perf_counter`."""

    def __init__(self, *, keep_body: bool, unframe: Callable[[bytes], bytes] = bytes) -> None:
        self.sent = time.perf_counter()
        self.is_done = False
        self.body: list[bytes] | None = [] if keep_body else None
        self._unframe = unframe
        self._unread: list[tuple[bytes, float]] = []
        self._times: list[float] = []
        self._events = EventCounter()

    def feed(self, data: bytes, now: float) -> None:
        """Takes a piece of the body, framed as it came."""
        self._unread.append((data, now))

    @property
    def times(self) -> list[float]:
        """When each event came; the last event closes the answer and brings no token."""
        unread, self._unread = self._unread, []
        for piece, now in unread:
            data = self._unframe(piece)
            self._times += [now] * self._events.feed(data)
            if self.body is not None:
                self.body.append(data)
        return self._times

    @property
    def first(self) -> float | None:
        """When the first event came."""
        return self.times[0] if self.times else None

    @property
    def ttft(self) -> float:
        """Seconds from the request to the first event."""
        return self.times[0] - self.sent

    @property
    def ended(self) -> float:
        """When the last token came."""
        return self.times[-2]

    @property
    def final(self) -> dict[str, Any]:
        """The closing event."""
        assert self.times, "no event has come"
        found: dict[str, Any] = json.loads(self._events.last.removeprefix(b"data:"))
        return found

    def token_ids(self) -> list[int]:
        """The ids of all tokens, where the request asked for `return_tokens` and `keep_body` was set."""
        assert self.times
        assert self.body is not None
        events = b"".join(self.body).split(b"\n\n")
        found = [json.loads(event.removeprefix(b"data:")) for event in events if event.startswith(b"data:")]
        return [id for event in found if not event["stop"] for id in event["tokens"]]


class Client(Protocol):
    """Starts requests, and reads all answers while it waits."""

    def start(self, body: dict[str, Any], *, keep_body: bool = False) -> Stream:
        """Sends POST /completion."""
        ...

    def wait_until(self, is_over: Callable[[], bool]) -> None:
        """Reads until the condition holds. Raises TimeoutError, or ConnectionError when an answer breaks off."""
        ...

    def wait(self, seconds: float) -> None:
        """Reads for a time."""
        ...

    def __enter__(self) -> Client: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class _Selecting:
    """What both clients share: a selector whose keys know how to read."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]  # sockets, all of them
        self._selector.close()

    def wait_until(self, is_over: Callable[[], bool]) -> None:
        deadline = time.perf_counter() + PATIENCE
        while not is_over():
            if time.perf_counter() > deadline:
                raise TimeoutError(f"no end after {PATIENCE:.0f} s")
            self._read(1.0)

    def wait(self, seconds: float) -> None:
        end = time.perf_counter() + seconds
        while (left := end - time.perf_counter()) > 0:
            self._read(left)

    def _read(self, timeout: float) -> None:
        for key, _ in self._selector.select(timeout):
            key.data()

    def _connect(self) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self._port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if _STAMPS is not None:
            sock.setsockopt(socket.SOL_SOCKET, _STAMPS, 1)
        return sock


class Http1Client(_Selecting):
    """One connection for each stream."""

    def start(self, body: dict[str, Any], *, keep_body: bool = False) -> Stream:
        data = json.dumps(body).encode()
        head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        sock = self._connect()
        stream = Stream(keep_body=keep_body, unframe=ChunkedBody().feed)
        answer = _Http1Answer(stream)

        def read() -> None:
            answer.feed(*_receive(sock))
            if stream.is_done:
                self._selector.unregister(sock)
                sock.close()

        sock.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        self._selector.register(sock, selectors.EVENT_READ, read)
        return stream


class _Http1Answer:
    """Head, then chunks."""

    _END = b"\r\n0\r\n\r\n"
    """A chunk's end and the last chunk; events have no carriage returns in them."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._head = b""
        self._has_head = False
        self._tail = b""

    def feed(self, data: bytes, now: float) -> None:
        if not data:
            raise ConnectionError(f"the answer broke off: {self._head!r}")
        if not self._has_head:
            self._head += data
            head, border, data = self._head.partition(b"\r\n\r\n")
            if not border:
                return
            if b" 200 " not in head[:16] or b"transfer-encoding: chunked" not in head.lower():
                raise ConnectionError(f"expected a chunked answer with status 200, not {self._head!r}")
            self._has_head = True
        self._stream.feed(data, now)
        self._tail = (self._tail + data)[-len(self._END) :]
        self._stream.is_done = self._tail == self._END


class Http2Client(_Selecting):
    """All streams on one connection.

    h2 does what is rare: settings, headers, the windows for request bodies. DATA frames, which are all of the
    traffic, are taken out before it; the windows we grant never close in the time of a run.
    """

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self._streams: dict[int, Stream] = {}
        self._unsent: dict[int, bytes] = {}
        self._rest = b""
        self._h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        wide = {h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: WIDE}
        self._h2.local_settings = h2.settings.Settings(client=True, initial_values=wide)
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(WIDE - 65535)
        self._sock = self._connect()
        self._selector.register(self._sock, selectors.EVENT_READ, self._read_frames)
        self._flush()

    def start(self, body: dict[str, Any], *, keep_body: bool = False) -> Stream:
        id = self._h2.get_next_available_stream_id()
        head = {":method": "POST", ":path": PATH, ":scheme": "http", ":authority": "localhost"}
        self._streams[id] = stream = Stream(keep_body=keep_body)
        self._h2.send_headers(id, list(head.items()))
        self._unsent[id] = json.dumps(body).encode()
        self._flush()
        return stream

    def _flush(self) -> None:
        """Sends what the server's windows have room for."""
        for id, data in list(self._unsent.items()):
            while data and (room := min(self._h2.local_flow_control_window(id), self._h2.max_outbound_frame_size)):
                self._h2.send_data(id, data[:room], end_stream=len(data) <= room)
                data = data[room:]
            self._unsent[id] = data
            if not data:
                del self._unsent[id]
        if pending := self._h2.data_to_send():
            self._sock.sendall(pending)

    def _read_frames(self) -> None:
        data, now = _receive(self._sock)
        if not data:
            raise ConnectionError("the server closed the connection")
        data = self._rest + data
        at, rare = 0, []
        while len(data) - at >= 9:
            end = at + 9 + int.from_bytes(data[at : at + 3], "big")
            if end > len(data):
                break
            if data[at + 3]:
                rare.append(data[at:end])
            else:
                self._take_data(data, at, end, now)
            at = end
        self._rest = data[at:]
        if rare:
            self._take_rare(b"".join(rare))

    def _take_data(self, data: bytes, at: int, end: int, now: float) -> None:
        """A DATA frame; our servers do not pad."""
        stream = self._streams[int.from_bytes(data[at + 5 : at + 9], "big")]
        stream.feed(data[at + 9 : end], now)
        stream.is_done = bool(data[at + 4] & 1)

    def _take_rare(self, data: bytes) -> None:
        for event in self._h2.receive_data(data):
            if isinstance(event, h2.events.ResponseReceived):
                status = dict(event.headers).get(b":status", b"")
                if status != b"200":
                    raise ConnectionError(f"expected status 200, not {status!r}")
            elif isinstance(event, h2.events.StreamReset | h2.events.ConnectionTerminated):
                raise ConnectionError(f"the server gave up: {event}")
        self._flush()


CLIENTS: dict[str, type[Http1Client] | type[Http2Client]] = {"http/1.1": Http1Client, "http/2": Http2Client}
"""By protocol."""
