"""A server in this process on a free port, a toy app for it, and clients that misbehave on purpose."""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings
import httpx
import trio
from quart import Response, jsonify, request
from quart_trio import QuartTrio

from llamatrio.server.serve import serve
from llamatrio.server.settings import ServerConfig

CERTS = Path(__file__).parent / "certs"
CERT, KEY = str(CERTS / "localhost.pem"), str(CERTS / "localhost.key")


@dataclass
class Served:
    """A running server."""

    port: int
    shutdown: trio.Event
    stopped: trio.Event
    tls: bool
    client_sockets: list[trio.socket.SocketType] = field(default_factory=list)
    """Closed when the server's block is left."""

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    def client(self, *, http2: bool = False, **options: Any) -> httpx.AsyncClient:
        """An httpx client of one protocol only."""
        verify = ssl.create_default_context(cafile=CERT) if self.tls else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        return httpx.AsyncClient(http1=not http2, http2=http2, base_url=self.url, verify=verify, timeout=10, **options)


@asynccontextmanager
async def serving(app: Any, *, tls: bool = False, **settings: Any) -> AsyncIterator[Served]:
    """Serves `app` until the block is left, then cuts what is open."""
    files = {"ssl_cert_file": CERT, "ssl_key_file": KEY} if tls else {}
    config = ServerConfig(**{"port": 0, "grace": 0.5, **files, **settings})
    shutdown, stopped = trio.Event(), trio.Event()

    async def run(task_status: Any) -> None:
        await serve(app, config, shutdown, task_status=task_status)
        stopped.set()

    async with trio.open_nursery() as nursery:
        urls = await nursery.start(run)
        served = Served(int(urls[0].rsplit(":", 1)[1]), shutdown, stopped, tls)
        try:
            yield served
        finally:
            for sock in served.client_sockets:
                sock.close()
        nursery.cancel_scope.cancel()


@dataclass
class Toy:
    """What the toy app has done."""

    live: int = 0
    produced: int = 0
    ends: list[str] = field(default_factory=list)

    @contextmanager
    def stream(self) -> Iterator[None]:
        self.live += 1
        try:
            yield
        except BaseException as error:
            self.ends.append(type(error).__name__)
            raise
        finally:
            self.live -= 1


def toy_app() -> tuple[QuartTrio, Toy]:
    """An app with streams that are paced, that flood and that fail, and bodies that are read or refused."""
    app, toy = QuartTrio("toy"), Toy()
    app.config.update(RESPONSE_TIMEOUT=None, MAX_CONTENT_LENGTH=1 << 20)

    def sse(body: AsyncIterator[bytes]) -> Response:
        return Response(body, content_type="text/event-stream")

    @app.get("/sse")
    async def paced() -> Response:
        n, pause = int(request.args.get("n", 5)), float(request.args.get("pause", 0.003))

        async def body() -> AsyncIterator[bytes]:
            with toy.stream():
                for i in range(n):
                    toy.produced += 1
                    yield b"data: %d\n\n" % i
                    await trio.sleep(pause)
                yield b"data: [DONE]\n\n"

        return sse(body())

    @app.get("/flood")
    async def flood() -> Response:
        async def body() -> AsyncIterator[bytes]:
            with toy.stream():
                while True:
                    toy.produced += 1
                    yield b"x" * 1024

        return sse(body())

    @app.get("/boom")
    async def boom() -> Response:
        async def body() -> AsyncIterator[bytes]:
            yield b"data: 1\n\n"
            await trio.sleep(0.01)
            raise RuntimeError("the engine failed in mid-stream")

        return sse(body())

    @app.post("/echo")
    async def echo() -> Response:
        return jsonify(n=len(await request.get_data()))

    @app.post("/reject")
    async def reject() -> tuple[Response, int]:
        return jsonify(error="no"), 413

    @app.get("/stats")
    async def stats() -> Response:
        return jsonify(live=toy.live, http=request.http_version)

    return app, toy


async def until(condition: Callable[[], Any], seconds: float = 3.0) -> None:
    """Polls, since what is waited for has no event of its own."""
    with trio.move_on_after(seconds) as patience:
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.004)
    assert not patience.cancelled_caught, "did not happen in time"


async def raw_socket(served: Served, *, receive_buffer: int | None = None) -> trio.socket.SocketType:
    """A TCP connection to the server."""
    sock = trio.socket.socket()
    served.client_sockets.append(sock)
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    await sock.connect(("127.0.0.1", served.port))
    return sock


def reset(sock: trio.socket.SocketType) -> None:
    """Closes with a TCP reset instead of a FIN."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


async def open_stream(
    served: Served, alpn: str, *, receive_buffer: int | None = None
) -> tuple[trio.abc.Stream, trio.socket.SocketType]:
    """A plain or TLS byte stream to the server, and the socket under it."""
    sock = await raw_socket(served, receive_buffer=receive_buffer)
    plain = trio.SocketStream(sock)
    if not served.tls:
        return plain, sock
    context = ssl.create_default_context(cafile=CERT)
    context.set_alpn_protocols([alpn])
    stream = trio.SSLStream(plain, context, server_hostname="localhost", https_compatible=True)
    await stream.do_handshake()
    return stream, sock


class H2Client:
    """An HTTP/2 client that does exactly what it is told."""

    def __init__(self, stream: trio.abc.Stream, sock: trio.socket.SocketType, window: int | None) -> None:
        self.stream = stream
        self.sock = sock
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        if window is not None:
            codes = h2.settings.SettingCodes
            self.h2.local_settings = h2.settings.Settings(
                client=True, initial_values={codes.INITIAL_WINDOW_SIZE: window}
            )
        self.events: list[h2.events.Event] = []
        self.is_closed = False

    @classmethod
    async def connect(cls, served: Served, *, receive_buffer: int | None = None, window: int | None = None) -> H2Client:
        client = cls(*await open_stream(served, "h2", receive_buffer=receive_buffer), window)
        client.h2.initiate_connection()
        await client.flush()
        return client

    async def flush(self) -> None:
        await self.stream.send_all(self.h2.data_to_send())

    async def request(
        self,
        path: str | bytes,
        method: str = "GET",
        *,
        end: bool = True,
        headers: Iterable[tuple[str, str]] = (),
    ) -> int:
        stream_id = self.h2.get_next_available_stream_id()
        pseudo = [(":method", method), (":path", path), (":scheme", "http"), (":authority", "localhost")]
        self.h2.send_headers(stream_id, [*pseudo, *headers], end_stream=end)
        await self.flush()
        return stream_id

    async def pump(self, seconds: float = 0.05, *, acknowledge: bool = True) -> None:
        """Reads for a while; what arrives is kept in `events`."""
        with trio.move_on_after(seconds):
            await self.read_until(lambda: False, acknowledge=acknowledge)

    async def read_until(self, condition: Callable[[], bool], *, acknowledge: bool = True) -> None:
        """Reads until the condition holds or the server has closed."""
        while not condition() and not self.is_closed:
            try:
                data = await self.stream.receive_some(65536)
            except trio.BrokenResourceError:
                data = b""
            if not data:
                self.is_closed = True
                return
            for event in self._events_of(data):
                self.events.append(event)
                if isinstance(event, h2.events.DataReceived) and acknowledge:
                    self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            await self.flush()

    def _events_of(self, data: bytes) -> list[h2.events.Event]:
        try:
            return self.h2.receive_data(data)
        except h2.exceptions.ProtocolError:  # we said GOAWAY, and h2 now expects silence
            self.is_closed = True
            return []

    async def wait(self, kind: type[h2.events.Event], stream_id: int | None = None) -> Any:
        """Reads until an event of this kind has come, and returns it."""

        def found() -> Any:
            for event in self.events:
                if isinstance(event, kind) and stream_id in (None, getattr(event, "stream_id", None)):
                    return event
            return None

        with trio.fail_after(5):
            await self.read_until(lambda: found() is not None)
        assert found() is not None, f"the connection closed before {kind.__name__}"
        return found()

    def body(self, stream_id: int) -> bytes:
        """What has arrived of a stream's body."""
        return b"".join(
            event.data
            for event in self.events
            if isinstance(event, h2.events.DataReceived) and event.stream_id == stream_id
        )

    async def aclose(self) -> None:
        self.sock.close()


@asynccontextmanager
async def bystander(served: Served) -> AsyncIterator[None]:
    """A well-behaved stream that must not notice what happens inside the block."""
    stream, sock = await open_stream(served, "http/1.1")
    await stream.send_all(b"GET /sse?n=100000 HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert b"200" in await stream.receive_some(65536)
    yield
    for _ in range(3):
        with trio.fail_after(2):
            assert b"data: " in await stream.receive_some(65536)
    sock.close()


async def in_background(action: Callable[[], Awaitable[Any]]) -> None:
    """Runs a client whose own failure does not matter."""
    with suppress(OSError, httpx.HTTPError, trio.BrokenResourceError, trio.ClosedResourceError):
        await action()
