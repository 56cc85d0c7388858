"""Protocols, keep-alive, and how the server ends."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from functools import partial

import h2.events
import httpx
import pytest
import trio
import trio.testing
from http_tools import H2Client, Served, open_stream, raw_socket, serving, toy_app, until

from llamatrio.server.serve import serve, until_signalled, watch_signals
from llamatrio.server.settings import ServerConfig

protocols = pytest.mark.parametrize(
    ("http2", "tls", "version"),
    [(False, False, "1.1"), (True, False, "2"), (False, True, "1.1"), (True, True, "2")],
    ids=["h1", "h2c", "h1-tls", "h2-tls"],
)


@protocols
async def test_streams_over_each_protocol(http2: bool, tls: bool, version: str) -> None:
    app, _ = toy_app()
    async with serving(app, tls=tls) as served, served.client(http2=http2) as client:
        response = await client.get("/sse?n=5")
        assert response.text.count("data: ") == 6
        assert (await client.get("/stats")).json()["http"] == version
        assert (await client.post("/echo", content=b"x" * 200_000)).json() == {"n": 200_000}


@protocols
async def test_each_event_leaves_at_once(http2: bool, tls: bool, version: str) -> None:
    app, _ = toy_app()
    async with serving(app, tls=tls) as served, served.client(http2=http2) as client:
        async with client.stream("GET", "/sse?n=3&pause=0.05") as response:
            chunks = [chunk async for chunk in response.aiter_raw()]
        assert len([chunk for chunk in chunks if b"data: " in chunk]) >= 3


async def test_upgrade_to_h2c() -> None:
    app, _ = toy_app()
    async with serving(app) as served:
        stream, sock = await open_stream(served, "http/1.1")
        client = H2Client(stream, sock, None)
        settings = client.h2.initiate_upgrade_connection()
        assert settings is not None
        await stream.send_all(
            b"GET /sse?n=3 HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade, http2-settings\r\n"
            b"upgrade: h2c\r\nhttp2-settings: " + settings + b"\r\n\r\n"
        )
        head = await stream.receive_some(65536)
        assert head.startswith(b"HTTP/1.1 101 ")
        rest = bytes(head.partition(b"\r\n\r\n")[2])
        client.events += client.h2.receive_data(rest)
        await client.flush()
        await client.wait(h2.events.StreamEnded, 1)
        assert client.body(1).endswith(b"[DONE]\n\n")
        second = await client.request("/stats")
        await client.wait(h2.events.StreamEnded, second)


async def test_many_streams_on_one_connection_share_writes() -> None:
    app, _ = toy_app()
    async with serving(app) as served:
        client = await H2Client.connect(served, window=1 << 20)
        client.h2.increment_flow_control_window(1 << 24)
        ids = [await client.request("/sse?n=3") for _ in range(200)]
        for stream_id in ids:
            await client.wait(h2.events.StreamEnded, stream_id)
        assert all(client.body(stream_id).endswith(b"[DONE]\n\n") for stream_id in ids)


async def test_idle_connections_are_closed() -> None:
    app, _ = toy_app()
    async with serving(app, keep_alive=0.1) as served:
        stream, _ = await open_stream(served, "http/1.1")
        await stream.send_all(b"GET /stats HTTP/1.1\r\nhost: x\r\n\r\n")
        await stream.receive_some(65536)
        unfinished = await raw_socket(served)
        await unfinished.send(b"GET /st")
        client = await H2Client.connect(served)
        await client.wait(h2.events.StreamEnded, await client.request("/stats"))
        with trio.fail_after(1):
            while await stream.receive_some(65536):
                pass
            assert await unfinished.recv(10) == b""
            await client.read_until(lambda: False)


async def test_busy_connection_outlives_keep_alive() -> None:
    app, _ = toy_app()
    async with serving(app, keep_alive=0.05) as served, served.client() as client:
        assert (await client.get("/sse?n=3&pause=0.08")).text.endswith("[DONE]\n\n")


async def new_connections_are_refused(served: Served) -> None:
    with trio.fail_after(1), suppress(OSError):
        while True:
            (await raw_socket(served)).close()


@pytest.mark.parametrize("http2", [False, True], ids=["h1", "h2c"])
async def test_shutdown_lets_streams_finish(http2: bool) -> None:
    app, toy = toy_app()
    answers: list[str] = []

    async def read(served: Served) -> None:
        async with served.client(http2=http2) as client:
            answers.append((await client.get("/sse?n=60")).text)

    async with serving(app, grace=5) as served, trio.open_nursery() as nursery:
        nursery.start_soon(read, served)
        await until(lambda: toy.live == 1)
        served.shutdown.set()
        await trio.sleep(0.02)
        with pytest.raises(OSError, match=r"refused|failed"):
            await raw_socket(served)
        with trio.fail_after(2):
            await served.stopped.wait()
    assert answers[0].endswith("[DONE]\n\n")


async def test_http2_refuses_new_streams_while_it_ends() -> None:
    app, _ = toy_app()
    async with serving(app, grace=5) as served:
        client = await H2Client.connect(served)
        old = await client.request("/sse?n=60")
        await client.wait(h2.events.DataReceived, old)
        served.shutdown.set()
        await new_connections_are_refused(served)
        await trio.testing.wait_all_tasks_blocked()
        new = await client.request("/stats")
        await client.wait(h2.events.StreamReset, new)
        await client.wait(h2.events.StreamEnded, old)
        await client.wait(h2.events.ConnectionTerminated)
        with trio.fail_after(1):
            await served.stopped.wait()


@pytest.mark.parametrize("http2", [False, True], ids=["h1", "h2c"])
async def test_shutdown_cuts_streams_after_the_grace_time(http2: bool) -> None:
    app, toy = toy_app()

    async def read(served: Served) -> None:
        async with served.client(http2=http2) as client:
            with pytest.raises(httpx.HTTPError):
                await client.get("/sse?n=100000")

    async with serving(app, grace=0.2) as served, trio.open_nursery() as nursery:
        nursery.start_soon(read, served)
        await until(lambda: toy.live == 1)
        served.shutdown.set()
        with trio.fail_after(1):
            await served.stopped.wait()
    assert toy.live == 0


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
async def test_idle_connections_do_not_delay_the_end(tls: bool) -> None:
    app, _ = toy_app()
    async with serving(app, tls=tls, grace=20) as served:
        await raw_socket(served)  # says nothing; with TLS it never finishes its handshake
        client = await H2Client.connect(served)
        await client.wait(h2.events.StreamEnded, await client.request("/stats"))
        stream, _ = await open_stream(served, "http/1.1")
        await stream.send_all(b"GET /stats HTTP/1.1\r\nhost: x\r\n\r\n")
        await stream.receive_some(65536)
        served.shutdown.set()
        with trio.fail_after(1):
            await served.stopped.wait()


async def test_silent_tls_handshake_is_dropped() -> None:
    app, _ = toy_app()
    async with serving(app, tls=True, handshake_timeout=0.1) as served:
        sock = await raw_socket(served)
        with trio.fail_after(1):
            assert await sock.recv(10) == b""


async def test_first_signal_ends_in_order_and_the_second_cuts() -> None:
    shutdown = trio.Event()
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            await nursery.start(watch_signals, shutdown, scope)
            os.kill(os.getpid(), signal.SIGTERM)
            with trio.fail_after(1):
                await shutdown.wait()
            assert not scope.cancel_called
            os.kill(os.getpid(), signal.SIGTERM)
            await trio.sleep(1)
    assert scope.cancelled_caught


async def test_serves_until_a_signal() -> None:
    app, _ = toy_app()
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(until_signalled, partial(serve, app, ServerConfig(port=0)))
            await trio.testing.wait_all_tasks_blocked(0.02)
            os.kill(os.getpid(), signal.SIGTERM)


async def test_errors_come_out_of_until_signalled_as_they_are() -> None:
    async def fail(shutdown: trio.Event) -> None:
        raise OSError("no such address")

    with pytest.raises(OSError, match="no such address"):
        await until_signalled(fail)


async def test_address_in_use_is_an_os_error() -> None:
    app, _ = toy_app()
    async with serving(app) as served:
        with pytest.raises(OSError, match="use"):
            await serve(app, ServerConfig(port=served.port), trio.Event())


async def test_several_addresses() -> None:
    app, _ = toy_app()
    shutdown = trio.Event()
    async with trio.open_nursery() as nursery:
        urls = await nursery.start(serve, app, ServerConfig(host="127.0.0.1,127.0.0.2", port=0), shutdown)
        assert [url.rpartition(":")[0] for url in urls] == ["http://127.0.0.1", "http://127.0.0.2"]
        shutdown.set()
    with pytest.raises(OSError, match=r"cannot listen on 192\.0\.2\.1:0"):
        await serve(app, ServerConfig(host="127.0.0.1,192.0.2.1", port=0), trio.Event())


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"ssl_cert_file": "a"}, "together"),
        ({"api_prefix": "llm/"}, "api_prefix"),
        ({"api_keys": ("",)}, "not empty"),
        ({"port": 70000}, "port"),
        ({"grace": -1.0}, "grace"),
    ],
)
def test_settings_are_checked(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ServerConfig(**wrong)  # type: ignore[arg-type]
