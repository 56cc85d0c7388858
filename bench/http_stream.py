"""Server CPU per streamed token: N chat streams over HTTP/1.1 and over one HTTP/2 connection, without a model.

    python bench/http_stream.py [--streams 32] [--seconds 3] [--hz 50]

The server runs in a process of its own and reads its own CPU time. Two engines stand in for the real one:
*flood* makes tokens as fast as they are taken; *paced* makes one for every stream at each step, `hz` times a
second, and hands it over as the engine does (a bounded channel and `send_nowait`). The clients only count bytes.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h2.config
import h2.connection
import h2.settings
import trio

from llamatrio.config import EngineConfig
from llamatrio.engine.events import Finished, TokenEvent
from llamatrio.model.chat import load_template
from llamatrio.model.gguf import open_gguf
from llamatrio.model.tokenizer import load_tokenizer
from llamatrio.sched.types import Request
from llamatrio.server.app import create_app
from llamatrio.server.serve import serve
from llamatrio.server.settings import ServerConfig

TINY = Path(__file__).parent.parent / "tests" / "golden" / "models" / "tiny-llama-f16.gguf"
BODY = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True}).encode()
WIDE = 2**31 - 1
TOKEN = TokenEvent(" word", (97,))


class FloodGeneration:
    """Tokens as fast as they are taken."""

    def __enter__(self) -> FloodGeneration:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __aiter__(self) -> FloodGeneration:
        return self

    async def __anext__(self) -> TokenEvent | Finished:
        await trio.lowlevel.checkpoint()
        return TOKEN


class PacedGeneration:
    """Tokens through a bounded channel."""

    def __init__(self, channels: set[Any]) -> None:
        self._channels = channels
        self.send, self._receive = trio.open_memory_channel[TokenEvent](64)

    def __enter__(self) -> PacedGeneration:
        self._channels.add(self.send)
        return self

    def __exit__(self, *_: object) -> None:
        self._channels.discard(self.send)

    def __aiter__(self) -> trio.MemoryReceiveChannel[TokenEvent]:
        return self._receive


class BenchEngine:
    """An engine with a tokenizer and no model."""

    config = EngineConfig()
    n_ctx_seq = 1 << 20

    def __init__(self, hz: float) -> None:
        self.hz = hz
        self.channels: set[Any] = set()
        with open_gguf(TINY) as file:
            tokenizer = load_tokenizer(file.metadata)
            template = load_template(file.metadata, tokenizer)
        self.model: Any = SimpleNamespace(name="bench", tokenizer=tokenizer, chat_template=template)

    def start(self, request: Request) -> Any:
        return PacedGeneration(self.channels) if self.hz else FloodGeneration()

    def stats(self) -> Any:
        raise NotImplementedError("the bench asks for no metrics")

    async def step_for_ever(self) -> None:
        while self.hz:
            await trio.sleep(1 / self.hz)
            for channel in self.channels:
                channel.send_nowait(TOKEN)


def run_server(pipe: Connection, hz: float) -> None:
    """The server's process: sends its port, then its CPU time whenever asked."""

    async def main() -> None:
        engine = BenchEngine(hz)
        settings = ServerConfig(port=0, max_streams=1000)
        async with trio.open_nursery() as nursery:
            (url,) = await nursery.start(serve, create_app(engine, settings), settings, trio.Event())
            nursery.start_soon(engine.step_for_ever)
            pipe.send(int(url.rsplit(":", 1)[1]))
            while await trio.to_thread.run_sync(pipe.recv):
                pipe.send(time.process_time())
            nursery.cancel_scope.cancel()

    trio.run(main)


@contextmanager
def server(hz: float) -> Iterator[tuple[int, Connection]]:
    """A server process and the pipe to it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_server, args=(theirs, hz))
    process.start()
    try:
        yield ours.recv(), ours
    finally:
        ours.send(False)
        process.join()


def http1_sockets(port: int, n: int) -> list[socket.socket]:
    """One connection for each stream."""
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(BODY)}\r\n\r\n".encode()
    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(n)]
    for sock in sockets:
        sock.sendall(head + BODY)
    return sockets


def http2_sockets(port: int, n: int) -> list[socket.socket]:
    """All streams on one connection, with windows that never close in the time of a run."""
    sock = socket.create_connection(("127.0.0.1", port))
    client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    codes = h2.settings.SettingCodes
    client.local_settings = h2.settings.Settings(client=True, initial_values={codes.INITIAL_WINDOW_SIZE: WIDE})
    client.initiate_connection()
    client.increment_flow_control_window(WIDE - 65535)
    for _ in range(n):
        stream_id = client.get_next_available_stream_id()
        path = (":path", "/v1/chat/completions")
        client.send_headers(
            stream_id, [(":method", "POST"), path, (":scheme", "http"), (":authority", "x")], end_stream=False
        )
        client.send_data(stream_id, BODY, end_stream=True)
    sock.sendall(client.data_to_send())
    return [sock]


def count(sock: socket.socket, until: list[float], counts: list[int], i: int) -> None:
    """Counts the events that arrive, and forgets them."""
    sock.settimeout(0.2)
    while time.monotonic() < until[0]:
        try:
            data = sock.recv(1 << 14)
        except TimeoutError:
            continue
        if not data:
            return
        counts[i] += data.count(b"data: ")


def measure(open_sockets: Any, n_streams: int, hz: float, seconds: float) -> dict[str, float]:
    """Events/s and microseconds of server CPU per event."""
    with server(hz) as (port, pipe):
        sockets = open_sockets(port, n_streams)
        until, counts = [time.monotonic() + 600], [0] * len(sockets)
        readers = [threading.Thread(target=count, args=(sock, until, counts, i)) for i, sock in enumerate(sockets)]
        for reader in readers:
            reader.start()
        time.sleep(0.5)
        before, cpu_before, started = sum(counts), ask(pipe), time.monotonic()
        time.sleep(seconds)
        n, cpu, elapsed = sum(counts) - before, ask(pipe) - cpu_before, time.monotonic() - started
        until[0] = 0
        for reader in readers:
            reader.join()
        for sock in sockets:
            sock.close()
    return {"events_per_s": n / elapsed, "us_per_event": cpu / n * 1e6, "cpu_percent": cpu / elapsed * 100}


def ask(pipe: Connection) -> float:
    """The server's CPU seconds so far."""
    pipe.send(True)
    seconds: float = pipe.recv()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--hz", type=float, default=50.0)
    args = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    print(f"{'engine':8} {'protocol':8} {'streams':>7} {'events/s':>10} {'us/event':>9} {'cpu %':>6}")
    for name, hz in (("paced", args.hz), ("flood", 0.0)):
        for protocol, open_sockets in (("h1", http1_sockets), ("h2c", http2_sockets)):
            row = measure(open_sockets, args.streams, hz, args.seconds)
            results[f"{name}_{protocol}"] = row
            print(
                f"{name:8} {protocol:8} {args.streams:7} {row['events_per_s']:10.0f}"
                f" {row['us_per_event']:9.1f} {row['cpu_percent']:6.0f}"
            )
    print(json.dumps({"bench": "http_stream", "streams": args.streams, "hz": args.hz, **results}))


if __name__ == "__main__":
    main()
