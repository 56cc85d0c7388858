"""The way past ASGI: what a client gets does not depend on which way its events take, nor on how slowly it reads."""

from __future__ import annotations

import json

import pytest
import trio
from fake_engine import FakeEngine, sse
from h2.events import StreamEnded
from http_tools import H2Client, Served, open_stream, serving, until

from llamatrio.engine.events import TokenEvent
from llamatrio.server.app import create_app
from llamatrio.server.direct import WAKE, Direct, Outlet
from llamatrio.server.settings import ServerConfig

N, WIDTH = 4000, 4000
"""Enough bytes to fill the kernel's buffers and ours several times."""
BODY = json.dumps({"prompt": [1], "stream": True, "n_predict": N}).encode()
HEAD = b"POST /completion HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"


class Flood(FakeEngine):
    """Makes numbered pieces, as fast as they are taken."""

    def __init__(self) -> None:
        super().__init__(*(f"{i:0{WIDTH}}" for i in range(N)))
        self.n_ctx_seq = N + 2


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often events went past ASGI, and how often a stream had to wait for its connection."""
    found = {"direct": 0, "waits": 0}
    taking, drained = Outlet.taking, Outlet.drained

    def counting(outlet: Outlet, piece):  # type: ignore[no-untyped-def]
        take = taking(outlet, piece)

        def counted(event: TokenEvent, now: float) -> TokenEvent | None:
            assert take is not None
            rest = take(event, now)
            found["direct"] += rest is not event
            return rest

        return take and counted

    async def counted_drained(outlet: Outlet) -> None:
        found["waits"] += 1
        await drained(outlet)

    monkeypatch.setattr(Outlet, "taking", counting)
    monkeypatch.setattr(Outlet, "drained", counted_drained)
    return found


def assert_whole(text: str) -> None:
    events = [json.loads(data) for data in sse(text)]
    assert events[-1]["stop"]
    assert [event["content"] for event in events[:-1]] == [f"{i:0{WIDTH}}" for i in range(N)]


async def paused(engine: Flood) -> None:
    """Waits until nothing more is produced."""
    before = 0
    while engine.produced != before or not before:
        before = engine.produced
        await trio.sleep(0.05)
    assert engine.produced < N, "the client's slowness must reach the engine"


async def read_http1(served: Served, engine: Flood) -> str:
    stream, _ = await open_stream(served, "http/1.1", receive_buffer=4096)
    await stream.send_all(HEAD % len(BODY) + BODY)
    await paused(engine)
    data = bytearray()
    while not data.endswith(b"\r\n0\r\n\r\n"):
        data += await stream.receive_some(1 << 16)
    rest, text = bytes(data.partition(b"\r\n\r\n")[2]), b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        n = int(size, 16)
        text += rest[:n]
        assert rest[n : n + 2] == b"\r\n"
        rest = rest[n + 2 :]
    return text.decode()


async def read_http2(served: Served, engine: Flood) -> str:
    client = await H2Client.connect(served)
    id = await client.request("/completion", "POST", end=False, headers=[("content-type", "application/json")])
    client.h2.send_data(id, BODY, end_stream=True)
    await client.flush()
    await client.pump(0.1, acknowledge=False)
    await paused(engine)
    taken = [event for event in client.events if hasattr(event, "flow_controlled_length")]
    for event in taken:
        client.h2.acknowledge_received_data(event.flow_controlled_length, id)
    await client.flush()
    await client.read_until(lambda: any(isinstance(event, StreamEnded) for event in client.events))
    return client.body(id).decode()


@pytest.mark.parametrize(("read", "tls"), [(read_http1, False), (read_http2, False), (read_http2, True)])
async def test_a_slow_client_gets_every_event_in_order(ways, read, tls) -> None:  # type: ignore[no-untyped-def]
    engine = Flood()
    with trio.fail_after(30):
        async with serving(create_app(engine, ServerConfig(port=0)), tls=tls) as served:
            assert_whole(await read(served, engine))
    assert ways["direct"] > N // 2
    assert ways["waits"] > 0


async def test_over_tls_http1_takes_the_ordinary_way(ways: dict[str, int]) -> None:
    engine = Flood()
    with trio.fail_after(30):
        async with serving(create_app(engine, ServerConfig(port=0)), tls=True) as served:
            assert_whole(await read_http1(served, engine))
    assert ways["direct"] == 0


async def test_an_http_1_0_client_gets_no_chunks(ways: dict[str, int]) -> None:
    engine = FakeEngine(*"abcdef")
    body = json.dumps({"prompt": [1], "stream": True, "n_predict": 6}).encode()
    async with serving(create_app(engine, ServerConfig(port=0))) as served:
        stream, _ = await open_stream(served, "http/1.1")
        head = b"POST /completion HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        await stream.send_all(head % len(body) + body)
        data = b""
        while more := await stream.receive_some(1 << 16):
            data += more
    assert b"transfer-encoding" not in data.partition(b"\r\n\r\n")[0].lower()
    events = [json.loads(event) for event in sse(data.partition(b"\r\n\r\n")[2].decode())]
    assert "".join(event["content"] for event in events) == "abcdef"
    assert ways["direct"] == 0


async def test_a_client_that_leaves_ends_its_generation(ways: dict[str, int]) -> None:
    engine = Flood()
    async with serving(create_app(engine, ServerConfig(port=0))) as served:
        stream, sock = await open_stream(served, "http/1.1", receive_buffer=4096)
        await stream.send_all(HEAD % len(BODY) + BODY)
        await paused(engine)
        sock.close()
        await until(lambda: not engine.running)
    assert len(engine.cancelled) == 1


class Scripted(Direct):
    """A connection that takes what it is told to."""

    def __init__(self) -> None:
        self.is_free = True
        self.has_room = True
        self.taken: list[bytes] = []

    def can_take(self) -> bool:
        return self.is_free

    def take(self, data: bytes) -> bool:
        self.taken.append(data)
        return self.has_room

    async def drained(self) -> None: ...


async def test_what_is_left_for_the_reader() -> None:
    outlet, direct, event = Outlet(), Scripted(), TokenEvent("x", (1,))
    assert outlet.taking(lambda event: event.text.encode()) is None, "no connection has offered itself"
    outlet.open(direct)
    take = outlet.taking(lambda event: event.text.encode())
    assert take is not None
    assert take(event, 5.0) is None
    assert outlet.sent_at == 5.0
    assert take(TokenEvent("", (1,)), 6.0) is None, "nothing to tell yet: nothing is sent"
    assert outlet.sent_at == 5.0
    direct.has_room = False
    assert take(event, 7.0) is WAKE
    direct.is_free = False
    assert take(event, 8.0) is event, "the reader sends it itself"
    assert direct.taken == [b"x", b"x"]
