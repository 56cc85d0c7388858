"""`python -m llamatrio serve` as a process: every protocol, an orderly end, and one line when it cannot start."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import h2.events
import httpx
import trio
from e2e_tools import MODEL, sse, until

from tests.emucuda import harness
from tests.emucuda.control import Control
from tests.server.http_tools import CERT, KEY, H2Client, Served, open_stream

ROOT = Path(__file__).parents[2]
CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0, "max_tokens": 5}
FLAGS = f"-m {MODEL} -ngl 99 -fa on -ctk q8_0 -ctv q8_0 -np 8 -kvu -c 2048 --cache-idle-slots -v --port 0 --ignore-eos"


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


def failed(*arguments: str) -> tuple[int, str]:
    """Exit code and stderr of a command that cannot start."""
    command = [sys.executable, "-m", "llamatrio", *arguments]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    assert result.stdout == ""
    return result.returncode, result.stderr


@dataclass
class Process:
    """A server that runs, and its log so far."""

    process: trio.Process
    served: Served
    log: list[str] = field(default_factory=list)

    async def ready(self) -> None:
        """Waits until the model has been loaded."""
        async with self.served.client() as client:
            while (await client.get("/health")).status_code == 503:  # noqa: ASYNC110
                await trio.sleep(0.02)


@asynccontextmanager
async def running(*flags: str, tls: bool = False, emulated: bool = False) -> AsyncIterator[Process]:
    """A server with these flags, killed at the end if it still runs; with `emulated` it finds a GPU."""
    launcher = ["tests.emucuda.run", "llamatrio"] if emulated else ["llamatrio"]
    command = [sys.executable, "-m", *launcher, "serve", *flags]
    variables = environment() | (harness.environment() if emulated else {})
    async with trio.open_nursery() as nursery:
        start = partial(trio.run_process, command, env=variables, stderr=subprocess.PIPE, check=False)
        process: trio.Process = await nursery.start(start)
        server = Process(process, Served(0, trio.Event(), trio.Event(), tls))
        nursery.start_soon(_read_log, server)
        with trio.fail_after(60):
            await until(lambda: any("listening on" in line for line in server.log))
            line = next(line for line in server.log if "listening on" in line)
            server.served.port = int(line.rsplit(":", 1)[1])
            await server.ready()
        yield server
        for sock in server.served.client_sockets:
            sock.close()
        if process.returncode is None:
            process.kill()


async def _read_log(server: Process) -> None:
    rest = b""
    assert server.process.stderr is not None
    async for data in server.process.stderr:
        *lines, rest = (rest + data).split(b"\n")
        server.log += [line.decode() for line in lines]
    server.log.append(rest.decode())


async def answer(client: httpx.AsyncClient) -> str:
    """The answer once the prompt is cached: the same numbers each time."""
    await client.post(CHAT, json=HI)
    response = await client.post(CHAT, json=HI)
    assert response.status_code == 200
    assert response.json()["usage"]["completion_tokens"] == 5
    return str(response.json()["choices"][0]["message"]["content"])


async def upgraded(served: Served) -> bytes:
    """GET /v1/models by an Upgrade to h2c."""
    stream, sock = await open_stream(served, "http/1.1")
    client = H2Client(stream, sock, None)
    settings = client.h2.initiate_upgrade_connection()
    assert settings is not None
    await stream.send_all(
        b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade, http2-settings\r\n"
        b"upgrade: h2c\r\nhttp2-settings: " + settings + b"\r\n\r\n"
    )
    head, _, rest = bytes(await stream.receive_some(65536)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 101 ")
    client.events += client.h2.receive_data(rest)
    await client.flush()
    await client.wait(h2.events.StreamEnded, 1)
    return client.body(1)


async def test_the_issues_command_line_serves_every_cleartext_protocol_and_ends_in_order() -> None:
    async with running(*FLAGS.split()) as server:
        async with server.served.client() as one, server.served.client(http2=True) as two:
            assert await answer(one) == await answer(two)
            assert b"tiny-qwen3-f16" in await upgraded(server.served)
            assert len((await one.get("/slots")).json()) == 8
            assert (await one.get("/props")).json()["default_generation_settings"]["n_ctx"] == 2048
        async with server.served.client() as client:
            long = {**HI, "max_tokens": 600, "stream": True}
            async with client.stream("POST", CHAT, json=long) as response:
                chunks = response.aiter_text()
                text = await anext(chunks)
                server.process.send_signal(signal.SIGTERM)
                await until(lambda: any("SIGTERM" in line for line in server.log))
                with trio.fail_after(30):
                    async for chunk in chunks:
                        text += chunk
        events = sse(text)
        assert events[-1] == "[DONE]"
        assert '"finish_reason":"length"' in events[-2]
        with trio.fail_after(10):
            assert await server.process.wait() == 0
    log = "\n".join(server.log)
    assert "saving idle slot to prompt cache" in log
    assert " - saving prompt with length" in log
    assert "prompt cache update took" in log
    assert "Traceback" not in log


async def test_a_gpu_is_taken_where_there_is_one_unless_the_cpu_is_asked_for(emucuda: Control) -> None:
    flags = ("-m", str(MODEL), "-c", "256", "-np", "2", "--port", "0", "--ignore-eos", "-ctk", "q8_0", "-ctv", "q8_0")
    for extra, device in (((), "device: CUDA, Emulated GPU"), (("--device", "cpu"), "device: CPU")):
        async with running(*flags, *extra, emulated=True) as server:
            async with server.served.client() as client:
                await answer(client)
            server.process.send_signal(signal.SIGTERM)
            with trio.fail_after(30):
                assert await server.process.wait() == 0
        log = "\n".join(server.log)
        assert device in log
        assert "Traceback" not in log


async def test_tls_speaks_what_alpn_agrees_on() -> None:
    flags = ("-m", str(MODEL), "-c", "512", "--port", "0", "--ignore-eos")
    async with running(*flags, "--ssl-cert-file", CERT, "--ssl-key-file", KEY, tls=True) as server:
        texts = set()
        for http2, version in ((False, "HTTP/1.1"), (True, "HTTP/2")):
            async with server.served.client(http2=http2) as client:
                texts.add(await answer(client))
                assert (await client.get("/health")).http_version == version
        assert len(texts) == 1
        context = ssl.create_default_context(cafile=CERT)
        context.set_alpn_protocols(["h2", "http/1.1"])
        plain = trio.SocketStream(await _connected(server.served.port))
        stream = trio.SSLStream(plain, context, server_hostname="localhost", https_compatible=True)
        await stream.do_handshake()
        assert stream.selected_alpn_protocol() == "h2"
        await plain.aclose()
        server.process.send_signal(signal.SIGTERM)
        with trio.fail_after(10):
            assert await server.process.wait() == 0


async def _connected(port: int) -> trio.socket.SocketType:
    sock = trio.socket.socket()
    await sock.connect(("127.0.0.1", port))
    return sock


def test_a_damaged_file_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(MODEL.read_bytes()[:5000])
    code, error = failed("serve", "--port", "0", "-m", str(damaged))
    assert code == 1
    assert error.count("\n") == 1 + error.count("listening on"), error
    assert "damaged.gguf" in error
    assert "Traceback" not in error


def test_a_port_in_use_is_one_line_and_exit_code_1() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, error = failed("serve", "--port", str(port), "-m", str(MODEL))
    assert code == 1
    assert error.count("\n") == 1, error
    assert str(port) in error, "the line does not name the port"


def test_an_unknown_flag_is_named() -> None:
    code, error = failed("serve", "--no-such-flag")
    assert code == 2
    assert "--no-such-flag" in error
