"""A client that leaves, in whatever way, is noticed at once and its generator is closed."""

from __future__ import annotations

import h2.events
import pytest
import trio
from h2.errors import ErrorCodes
from http_tools import H2Client, Served, open_stream, reset, serving, toy_app, until

tls_too = pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])


async def http1_stream(served: Served) -> trio.socket.SocketType:
    stream, sock = await open_stream(served, "http/1.1")
    await stream.send_all(b"GET /sse?n=100000 HTTP/1.1\r\nhost: x\r\n\r\n")
    await stream.receive_some(1000)
    return sock


async def http2_streams(served: Served, n: int) -> tuple[H2Client, list[int]]:
    client = await H2Client.connect(served)
    ids = [await client.request("/sse?n=100000") for _ in range(n)]
    for stream_id in ids:
        await client.wait(h2.events.DataReceived, stream_id)
    return client, ids


@tls_too
@pytest.mark.parametrize("leave", [lambda sock: sock.close(), reset], ids=["close", "reset"])
async def test_http1_connection_lost(tls: bool, leave) -> None:  # type: ignore[no-untyped-def]
    app, toy = toy_app()
    async with serving(app, tls=tls) as served:
        sock = await http1_stream(served)
        await until(lambda: toy.live == 1)
        leave(sock)
        await until(lambda: toy.live == 0, 0.5)
        assert toy.ends in (["Cancelled"], ["GeneratorExit"])


async def test_http1_half_close() -> None:
    app, toy = toy_app()
    async with serving(app) as served:
        sock = await http1_stream(served)
        sock.shutdown(trio.socket.SHUT_WR)
        await until(lambda: toy.live == 0, 0.5)


@tls_too
async def test_http2_reset_stream_ends_that_stream_only(tls: bool) -> None:
    app, toy = toy_app()
    async with serving(app, tls=tls) as served:
        client, (first, second) = await http2_streams(served, 2)
        client.h2.reset_stream(first, ErrorCodes.CANCEL)
        await client.flush()
        await until(lambda: toy.live == 1, 0.5)
        client.events.clear()
        await client.wait(h2.events.DataReceived, second)


@tls_too
@pytest.mark.parametrize("leave", [lambda sock: sock.close(), reset], ids=["close", "reset"])
async def test_http2_connection_lost(tls: bool, leave) -> None:  # type: ignore[no-untyped-def]
    app, toy = toy_app()
    async with serving(app, tls=tls) as served:
        client, _ = await http2_streams(served, 5)
        leave(client.sock)
        await until(lambda: toy.live == 0, 0.5)
        assert len(toy.ends) == 5


@tls_too
async def test_http2_goaway(tls: bool) -> None:
    app, toy = toy_app()
    async with serving(app, tls=tls) as served:
        client, _ = await http2_streams(served, 5)
        client.h2.close_connection()
        await client.flush()
        await until(lambda: toy.live == 0, 0.5)


async def test_client_that_leaves_before_the_first_byte() -> None:
    app, toy = toy_app()
    async with serving(app) as served:
        stream, sock = await open_stream(served, "http/1.1")
        await stream.send_all(b"GET /sse?n=100000&pause=0.2 HTTP/1.1\r\nhost: x\r\n\r\n")
        await until(lambda: toy.live == 1)
        sock.close()
        await until(lambda: toy.live == 0, 0.15)
