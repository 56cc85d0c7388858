"""Peers that break the protocol, or the rules of politeness, hurt nobody but themselves.

Each case here stops, wedges or bloats Hypercorn 0.18's own Trio worker, or is a neighbour of one that does.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

import h2.events
import hyperframe.frame as frames
import pytest
import trio
import trio.testing
from h2.errors import ErrorCodes
from http_tools import H2Client, Served, bystander, open_stream, raw_socket, reset, serving, toy_app, until

Case = Callable[[Served], Awaitable[None]]
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


async def goaway_with_live_streams(served: Served) -> None:
    for _ in range(4):
        client = await H2Client.connect(served)
        for _ in range(8):
            await client.request("/sse?n=100000")
        await client.pump()
        client.h2.close_connection()
        await client.flush()
        await client.pump(0.02)
        await client.aclose()


async def body_goes_on_after_early_response(served: Served) -> None:
    client = await H2Client.connect(served)
    stream_id = await client.request("/reject", "POST", end=False, headers=[("content-length", "400000")])
    await client.wait(h2.events.StreamEnded, stream_id)
    for _ in range(3):
        await client.stream.send_all(frames.DataFrame(stream_id, b"x" * 10000).serialize())
        await client.pump(0.01)
    other = await client.request("/stats")
    await client.wait(h2.events.StreamEnded, other)
    await client.aclose()


async def many_small_data_frames_for_an_app_that_left(served: Served) -> None:
    client = await H2Client.connect(served)
    stream_id = await client.request("/reject", "POST", end=False)
    await client.stream.send_all(frames.DataFrame(stream_id, b"x").serialize() * 500)
    await client.wait(h2.events.StreamEnded, stream_id)
    await client.aclose()


async def reset_flood(served: Served) -> None:
    client = await H2Client.connect(served)
    for i in range(300):
        stream_id = await client.request("/sse?n=100000")
        if i % 50 == 0:
            await client.pump(0.005)
        client.h2.reset_stream(stream_id, ErrorCodes.CANCEL)
        await client.flush()
    other = await client.request("/stats")
    await client.wait(h2.events.StreamEnded, other)
    await client.aclose()


async def waves_of_resets(served: Served) -> None:
    client = await H2Client.connect(served)
    for _ in range(10):
        ids = [await client.request("/sse?n=100000") for _ in range(50)]
        await client.pump(0.01)
        for stream_id in ids:
            client.h2.reset_stream(stream_id, ErrorCodes.CANCEL)
        await client.flush()
    await client.aclose()


async def reset_of_flooding_streams(served: Served) -> None:
    client = await H2Client.connect(served)
    for _ in range(10):
        ids = [await client.request("/flood") for _ in range(4)]
        await client.pump(0.005)
        for stream_id in ids:
            with suppress(Exception):
                client.h2.reset_stream(stream_id, ErrorCodes.CANCEL)
        await client.flush()
    await client.aclose()


async def non_ascii_path(served: Served) -> None:
    client = await H2Client.connect(served)
    stream_id = await client.request(b"/caf\xc3\xa9")
    event = await client.wait(h2.events.StreamReset, stream_id)
    assert event.error_code == ErrorCodes.PROTOCOL_ERROR
    other = await client.request("/stats")
    await client.wait(h2.events.StreamEnded, other)
    await client.aclose()


async def connect_without_path(served: Served) -> None:
    client = await H2Client.connect(served)
    stream_id = client.h2.get_next_available_stream_id()
    client.h2.send_headers(stream_id, [(":method", "CONNECT"), (":authority", "localhost")])
    await client.flush()
    await client.wait(h2.events.StreamReset, stream_id)
    await client.aclose()


async def priority_flood(served: Served) -> None:
    client = await H2Client.connect(served)
    for i in range(1, 2401, 2):
        await client.stream.send_all(frames.PriorityFrame(i, depends_on=0, stream_weight=15).serialize())
    await client.pump()
    await client.aclose()


async def priority_on_itself(served: Served) -> None:
    client = await H2Client.connect(served)
    await client.stream.send_all(frames.PriorityFrame(1, depends_on=1, stream_weight=15).serialize())
    await client.pump(0.02)
    await client.aclose()


async def priority_cycle(served: Served) -> None:
    client = await H2Client.connect(served)
    await client.request("/stats")
    a_on_b = frames.PriorityFrame(1, depends_on=3, stream_weight=0)
    b_on_a = frames.PriorityFrame(3, depends_on=1, stream_weight=0, exclusive=True)
    await client.stream.send_all(a_on_b.serialize() + b_on_a.serialize())
    await client.pump(0.02)
    await client.aclose()


async def data_on_stream_zero(served: Served) -> None:
    for _ in range(4):
        client = await H2Client.connect(served)
        for _ in range(8):
            await client.request("/sse?n=100000")
        await client.pump()
        await client.stream.send_all(b"\0\0\1" + b"\0" * 6 + b"x")  # one byte of DATA on stream 0
        await client.wait(h2.events.ConnectionTerminated)
        await client.aclose()


async def ping_flood_unread(served: Served) -> None:
    client = await H2Client.connect(served, receive_buffer=4096)
    with trio.move_on_after(0.2), suppress(trio.BrokenResourceError):
        while True:
            await client.stream.send_all(frames.PingFrame(0, b"12345678").serialize() * 500)
    await client.aclose()


async def garbage(served: Served) -> None:
    pieces = (
        b"\x16\x03\x01garbage" * 10,
        b"GET / HTTP/9.9\r\n\r\n",
        b"\0" * 1000,
        b"POST /echo HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET relative HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /stats HTTP/1.1\r\nhost: [::\r\n\r\n",
        b"GET /stats HTTP/1.1\r\nhost: \xff\xfe b\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\nhost: a:1\r\n\r\n",
        PREFACE + b"\xff" * 64,
    )
    for piece in pieces:
        sock = await raw_socket(served)
        await sock.send(piece)
        with trio.move_on_after(0.02), suppress(OSError):
            await sock.recv(1000)
        sock.close()


async def non_ascii_path_http1(served: Served) -> None:
    assert b" 400 " in await first_answer(served, b"GET /caf\xc3\xa9 HTTP/1.1\r\nhost: x\r\n\r\n")


async def target_without_path(served: Served) -> None:
    assert b" 400 " in await first_answer(served, b"GET relative HTTP/1.1\r\nhost: x\r\n\r\n")


async def websocket_is_plain_http(served: Served) -> None:
    head = (
        b"GET /stats HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
        b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    assert b" 200 " in await first_answer(served, head)


async def upgrade_with_bad_settings(served: Served) -> None:
    head = (
        b"GET /stats HTTP/1.1\r\nhost: x\r\nconnection: upgrade, http2-settings\r\n"
        b"upgrade: h2c\r\nhttp2-settings: !!!\r\n\r\n"
    )
    await first_answer(served, head)


async def upgrade_without_settings(served: Served) -> None:
    head = b"GET /stats HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
    assert b" 101 " in await first_answer(served, head)


async def pipelined_requests(served: Served) -> None:
    sock = await raw_socket(served)
    await sock.send(b"GET /sse?n=3 HTTP/1.1\r\nhost: x\r\n\r\n" * 3)
    got = b""
    with trio.fail_after(3):
        while got.count(b"[DONE]") < 3:
            got += await sock.recv(65536)
    assert got.count(b"HTTP/1.1 200") == 3
    sock.close()


async def close_in_mid_body(served: Served) -> None:
    for _ in range(5):
        sock = await raw_socket(served)
        await sock.send(b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n{")
        await trio.sleep(0.003)
        sock.close()


async def tcp_reset_storm(served: Served) -> None:
    for _ in range(20):
        sock = await raw_socket(served)
        await sock.send(b"GET /flood HTTP/1.1\r\nhost: x\r\n\r\n")
        await trio.sleep(0.003)
        reset(sock)


async def tcp_reset_storm_http2(served: Served) -> None:
    for _ in range(8):
        client = await H2Client.connect(served)
        for _ in range(8):
            await client.request("/flood")
        await client.pump(0.005)
        reset(client.sock)


async def header_bomb(served: Served) -> None:
    assert b" 431 " in await first_answer(served, b"GET /stats HTTP/1.1\r\nhost: x\r\na: " + b"b" * 70000)


CASES = [
    goaway_with_live_streams,
    body_goes_on_after_early_response,
    many_small_data_frames_for_an_app_that_left,
    reset_flood,
    waves_of_resets,
    reset_of_flooding_streams,
    non_ascii_path,
    connect_without_path,
    priority_flood,
    priority_on_itself,
    priority_cycle,
    data_on_stream_zero,
    ping_flood_unread,
    garbage,
    non_ascii_path_http1,
    target_without_path,
    websocket_is_plain_http,
    upgrade_with_bad_settings,
    upgrade_without_settings,
    pipelined_requests,
    close_in_mid_body,
    tcp_reset_storm,
    tcp_reset_storm_http2,
    header_bomb,
]
TLS_CASES = [goaway_with_live_streams, data_on_stream_zero, tcp_reset_storm_http2]


async def first_answer(served: Served, head: bytes) -> bytes:
    sock = await raw_socket(served)
    await sock.send(head)
    answer = b""
    with trio.move_on_after(1), suppress(OSError):
        answer = await sock.recv(1000)
    sock.close()
    return answer


async def check(case: Case, served: Served) -> None:
    """Runs a case next to a well-behaved stream, and checks that server and stream go on."""
    async with bystander(served):
        await case(served)
    async with served.client() as client:
        assert (await client.get("/stats")).status_code == 200


def n_tasks() -> int:
    return trio.lowlevel.current_statistics().tasks_living


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_server_and_bystander_survive(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    app, toy = toy_app()
    async with serving(app) as served:
        await trio.testing.wait_all_tasks_blocked()
        before = n_tasks()
        await check(case, served)
        await until(lambda: toy.live == 0 and n_tasks() == before)
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("case", TLS_CASES, ids=lambda case: case.__name__)
async def test_server_and_bystander_survive_over_tls(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    app, toy = toy_app()
    async with serving(app, tls=True) as served:
        await check(case, served)
        await until(lambda: toy.live == 0)
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR] == []


async def test_garbage_on_a_tls_port() -> None:
    app, _ = toy_app()
    async with serving(app, tls=True) as served:
        await check(garbage, served)


@pytest.mark.parametrize("http2", [False, True], ids=["h1", "h2"])
async def test_body_over_the_limit_is_413(http2: bool) -> None:
    app, _ = toy_app()
    async with serving(app) as served, served.client(http2=http2) as client:
        response = await client.post("/echo", content=b"x" * (3 << 20))
        assert response.status_code == 413
        assert (await client.get("/stats")).status_code == 200


async def test_failing_app_resets_its_http2_stream_only(caplog: pytest.LogCaptureFixture) -> None:
    app, _ = toy_app()
    async with serving(app) as served:
        client = await H2Client.connect(served)
        other = await client.request("/sse?n=20")
        stream_id = await client.request("/boom")
        event = await client.wait(h2.events.StreamReset, stream_id)
        assert event.error_code == ErrorCodes.INTERNAL_ERROR
        await client.wait(h2.events.StreamEnded, other)
        assert client.body(other).endswith(b"[DONE]\n\n")
        await client.aclose()
    assert "the app failed on GET /boom" in caplog.text


async def test_failing_app_ends_its_http1_body_short() -> None:
    app, _ = toy_app()
    async with serving(app) as served:
        stream, sock = await open_stream(served, "http/1.1")
        await stream.send_all(b"GET /boom HTTP/1.1\r\nhost: x\r\n\r\n")
        got = b""
        with trio.fail_after(2):
            while data := await stream.receive_some(65536):
                got += data
        assert b"data: 1" in got
        assert not got.endswith(b"0\r\n\r\n")
        sock.close()


async def test_a_thousand_requests_on_one_connection_leave_its_streams_alone() -> None:
    app, _ = toy_app()
    async with serving(app) as served:
        client = await H2Client.connect(served)
        long = await client.request("/sse?n=100000")
        for _ in range(1010):
            stream_id = await client.request("/stats")
            await client.wait(h2.events.StreamEnded, stream_id)
            client.events.clear()
        await client.wait(h2.events.DataReceived, long)
        await client.aclose()
