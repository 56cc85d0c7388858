"""A peer that does not read pauses its own stream, keeps memory flat, and cannot hold up the end."""

from __future__ import annotations

import pytest
import trio
from http_tools import H2Client, Served, Toy, bystander, open_stream, serving, toy_app, until

WIDE = 2**31 - 1
FLOODED_KIB = 16 * 1024
"""What a stalled stream may have produced: kernel buffers (a few MiB on loopback) plus ours."""


async def production_stops(toy: Toy) -> int:
    """Waits until the apps are paused; returns how many KiB they had produced."""
    before = -1
    with trio.fail_after(3):
        while toy.produced != before:
            before = toy.produced
            await trio.sleep(0.05)
    return toy.produced


async def stalled_http1(served: Served) -> trio.socket.SocketType:
    stream, sock = await open_stream(served, "http/1.1", receive_buffer=4096)
    await stream.send_all(b"GET /flood HTTP/1.1\r\nhost: x\r\n\r\n")
    return sock


async def stalled_http2(served: Served) -> trio.socket.SocketType:
    client = await H2Client.connect(served, receive_buffer=4096, window=WIDE)
    client.h2.increment_flow_control_window(WIDE - 65535)
    await client.request("/flood")
    return client.sock


STALLS = [(stalled_http1, False), (stalled_http2, False), (stalled_http2, True)]
stalls = pytest.mark.parametrize(("stall", "tls"), STALLS, ids=["h1", "h2c", "h2-tls"])


async def test_closed_http2_window_pauses_the_app() -> None:
    app, toy = toy_app()
    async with serving(app) as served:
        client = await H2Client.connect(served)
        for _ in range(2):
            await client.request("/flood")
        await client.pump(0.1, acknowledge=False)
        assert await production_stops(toy) <= 2 * (32 + 1) + 64  # two outboxes and the connection's window
        assert toy.live == 2
        async with bystander(served):
            pass
        await client.aclose()
        await until(lambda: toy.live == 0)


async def test_stream_stalled_too_long_is_reset_alone() -> None:
    app, toy = toy_app()
    async with serving(app, write_timeout=0.2) as served:
        client = await H2Client.connect(served, window=1000)
        await client.request("/flood")
        await client.pump(0.05, acknowledge=False)
        await until(lambda: toy.live == 0)
        other = await client.request("/stats")
        await client.pump(0.1, acknowledge=False)
        assert b"live" in client.body(other)


@stalls
async def test_stalled_connection_pauses_its_app_and_nobody_else(stall, tls) -> None:  # type: ignore[no-untyped-def]
    app, toy = toy_app()
    async with serving(app, tls=tls) as served, bystander(served):
        await stall(served)
        await until(lambda: toy.produced)
        assert await production_stops_next_to_others(toy) < FLOODED_KIB
        assert toy.live == 2


async def production_stops_next_to_others(toy: Toy) -> int:
    """As above, but a well-behaved stream goes on: what it makes is far less than a flood."""
    with trio.fail_after(3):
        while True:
            before = toy.produced
            await trio.sleep(0.05)
            if toy.produced - before < 30:
                return toy.produced


@stalls
async def test_stalled_connection_is_dropped_in_time(stall, tls) -> None:  # type: ignore[no-untyped-def]
    app, toy = toy_app()
    async with serving(app, tls=tls, write_timeout=0.2) as served:
        await stall(served)
        await until(lambda: toy.live)
        await until(lambda: toy.live == 0)


@stalls
async def test_stalled_connection_is_released_when_it_closes(stall, tls) -> None:  # type: ignore[no-untyped-def]
    app, toy = toy_app()
    async with serving(app, tls=tls) as served:
        sock = await stall(served)
        await until(lambda: toy.live)
        await production_stops(toy)
        sock.close()
        await until(lambda: toy.live == 0)


@pytest.mark.parametrize("stall", [stalled_http1, stalled_http2], ids=["h1", "h2c"])
async def test_stalled_connection_is_released_by_a_half_close(stall) -> None:  # type: ignore[no-untyped-def]
    app, toy = toy_app()
    async with serving(app) as served:
        sock = await stall(served)
        await until(lambda: toy.live)
        await production_stops(toy)
        sock.shutdown(trio.socket.SHUT_WR)
        await until(lambda: toy.live == 0)


async def test_paced_stream_with_a_small_window_stops_at_its_outbox() -> None:
    app, toy = toy_app()
    async with serving(app) as served:
        client = await H2Client.connect(served, window=2000)
        await client.request("/sse?n=100000&pause=0")
        await client.pump(0.05, acknowledge=False)
        assert await production_stops(toy) * len(b"data: 1000\n\n") < 2000 + (1 << 16)


@stalls
async def test_stalled_connection_does_not_delay_the_end(stall, tls) -> None:  # type: ignore[no-untyped-def]
    app, toy = toy_app()
    async with serving(app, tls=tls, grace=0.2) as served:
        await stall(served)
        await until(lambda: toy.live)
        await production_stops(toy)
        served.shutdown.set()
        with trio.fail_after(1):
            await served.stopped.wait()
        assert toy.live == 0
