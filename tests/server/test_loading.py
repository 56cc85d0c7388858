"""The port is open while the model loads."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import pytest
import trio
import trio.testing
from fake_engine import FakeEngine
from http_tools import until

from llamatrio.errors import GGUFError
from llamatrio.server.loading import serve_while_loading
from llamatrio.server.settings import ServerConfig


class Opening:
    """An engine that opens when told, and notes when it closes."""

    def __init__(self) -> None:
        self.may_open = trio.Event()
        self.fails: Exception | None = None
        self.is_closed = False
        self.engine = FakeEngine()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Any]:
        try:
            await self.may_open.wait()
            if self.fails is not None:
                raise self.fails
            yield self.engine
        finally:
            assert self.engine.running == []
            self.is_closed = True


@asynccontextmanager
async def free_port() -> AsyncIterator[int]:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listener.socket.getsockname()[1]
    await listener.aclose()
    yield port


async def get(port: int, path: str) -> httpx.Response:
    async with httpx.AsyncClient() as client:
        return await client.get(f"http://127.0.0.1:{port}{path}")


async def answers(port: int, status: int) -> None:
    """Waits until the server's health has this status."""
    with trio.fail_after(3):
        while True:
            with suppress(httpx.ConnectError):
                if (await get(port, "/health")).status_code == status:
                    return
            await trio.sleep(0.005)


async def test_503_until_the_model_is_there() -> None:
    opening, shutdown = Opening(), trio.Event()
    async with free_port() as port, trio.open_nursery() as nursery:
        nursery.start_soon(serve_while_loading, opening.open(), ServerConfig(port=port), shutdown)
        await answers(port, 503)
        for path in ("/health", "/v1/models", "/anything"):
            response = await get(port, path)
            assert response.status_code == 503
            assert response.headers["retry-after"] == "1"
            assert response.json()["error"] == {
                "code": 503,
                "message": "Loading model",
                "type": "unavailable_error",
            }
        opening.may_open.set()
        await answers(port, 200)
        shutdown.set()
    assert opening.is_closed


async def test_pages_on_other_origins_learn_that_the_model_loads() -> None:
    opening, shutdown = Opening(), trio.Event()
    origin, asks = {"origin": "https://chat.example"}, {"access-control-request-headers": "authorization"}
    async with free_port() as port, trio.open_nursery() as nursery, httpx.AsyncClient() as client:
        url = f"http://127.0.0.1:{port}/health"
        nursery.start_soon(serve_while_loading, opening.open(), ServerConfig(port=port), shutdown)
        seen: dict[int, list[httpx.Response]] = {}
        for status in (503, 200):
            await answers(port, status)
            seen[status] = [
                await client.get(url, headers=origin),
                await client.options(url, headers=origin | asks),
            ]
            opening.may_open.set()
        shutdown.set()
    for response in (*seen[503], *seen[200]):
        assert response.headers["access-control-allow-origin"] == "*"
    early, late = (preflight for _, preflight in seen.values())
    assert early.status_code == late.status_code == 204
    for name in ("access-control-allow-methods", "access-control-allow-headers", "access-control-max-age"):
        assert early.headers[name] == late.headers[name]


async def test_engine_closes_after_the_last_stream() -> None:
    opening, shutdown = Opening(), trio.Event()
    opening.may_open.set()
    opening.engine.pause = 0.02
    async with trio.open_nursery() as nursery:
        (url,) = await nursery.start(serve_while_loading, opening.open(), ServerConfig(port=0), shutdown)
        async with httpx.AsyncClient() as client, trio.open_nursery() as asking:

            async def ask() -> None:
                response = await client.post(f"{url}/completion", json={"prompt": "a", "n_predict": 5})
                assert response.json()["tokens_predicted"] == 5
                assert not opening.is_closed

            asking.start_soon(ask)
            await until(lambda: opening.engine.running)
            shutdown.set()
    assert opening.is_closed


async def test_engine_that_does_not_open_ends_the_server() -> None:
    opening = Opening()
    opening.fails = GGUFError("the file is cut short")
    opening.may_open.set()
    with pytest.raises(GGUFError, match="cut short"):
        await serve_while_loading(opening.open(), ServerConfig(port=0), trio.Event())


async def test_address_in_use_is_an_os_error_and_opens_nothing() -> None:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    port = listener.socket.getsockname()[1]
    with pytest.raises(OSError, match="use"):
        await serve_while_loading(Opening().open(), ServerConfig(port=port), trio.Event())
    await listener.aclose()


async def test_shutdown_abandons_loading() -> None:
    opening, shutdown = Opening(), trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_while_loading, opening.open(), ServerConfig(port=0), shutdown)
        await trio.testing.wait_all_tasks_blocked()
        shutdown.set()
        await until(lambda: opening.is_closed)
