"""Servers as processes: started, awaited, asked, and always stopped."""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

START_PATIENCE = 120.0
"""Seconds to wait for /health: the first start on a machine compiles."""
STOP_PATIENCE = 15.0
POLL = 0.05
"""Seconds between two looks at /health; each costs the server time in which it could load."""


class ServerFailed(Exception):
    """A server did not start, or ended; says what its log said last."""


@dataclass
class Server:
    """A running server on a port of this machine."""

    name: str
    port: int
    process: subprocess.Popen[bytes]
    start_seconds: float = 0.0
    """From its start to the first 200 of /health."""
    folder: Path = field(default_factory=Path)

    def get(self, path: str) -> str:
        """The body of a GET. Raises ServerFailed when the status is not 200."""
        return self._ask("GET", path)

    def post(self, path: str) -> str:
        """The body of a POST without a body of its own."""
        return self._ask("POST", path)

    def metric(self, name: str) -> float:
        """A counter or gauge of /metrics."""
        for line in self.get("/metrics").splitlines():
            if line.startswith(name + " "):
                return float(line.rpartition(" ")[2])
        raise ServerFailed(f"{self.name} has no metric {name}")

    def cpu_seconds(self) -> float:
        """CPU time of the process, to the nanosecond, threads that have ended included."""
        return time.clock_gettime((~self.process.pid << 3) | 2)  # as clock_getcpuclockid() makes it

    def forget_prompts(self, n_slots: int) -> None:
        """Empties the slots of a llama-server that was started by `llama_server_command`."""
        for slot in range(n_slots):
            self.post(f"/slots/{slot}?action=erase")

    def log_tail(self) -> str:
        """The end of what the server wrote."""
        return (self.folder / "log").read_text(errors="replace")[-2000:]

    def _ask(self, method: str, path: str) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path)
            answer = connection.getresponse()
            body = answer.read().decode()
        finally:
            connection.close()
        if answer.status != 200:
            raise ServerFailed(f"{self.name}: {method} {path} answered {answer.status}: {body[:500]}")
        return body


def llamatrio_command(model: Path, *flags: str) -> list[str]:
    """The command line of our server."""
    return [sys.executable, "-m", "llamatrio", "serve", "-m", str(model), "--metrics", *flags]


def llama_server_command(binary: Path, model: Path, *flags: str) -> list[str]:
    """The command line of a llama-server, with the slot actions that `forget_prompts` needs."""
    return [str(binary), "-m", str(model), "--no-webui", "--slot-save-path", tempfile.gettempdir(), *flags]


@contextmanager
def running(name: str, command: Sequence[str]) -> Iterator[Server]:
    """Starts a server on a free port and waits until it is ready. On the way out: SIGTERM, then SIGKILL.

    Raises:
        ServerFailed: it ended while it was needed, or was not ready in time.
    """
    folder = Path(tempfile.mkdtemp(prefix="llamatrio-bench-"))
    port = free_port()
    with open(folder / "log", "wb") as log:
        process = _spawn([*command, "--port", str(port)], log)
        server = Server(name, port, process, folder=folder)
        try:
            server.start_seconds = _wait_until_ready(server)
            yield server
        except OSError as error:
            if _has_ended(process):
                raise ServerFailed(_obituary(server)) from error
            raise
        finally:
            _stop(process)
            shutil.rmtree(folder, ignore_errors=True)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def stop_on_sigterm() -> None:
    """SIGTERM ends the bench as Ctrl-C does: by an exception, so that its servers are stopped."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def _spawn(command: Sequence[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    # A session of its own: Ctrl-C reaches the bench only, which then stops its servers one by one.
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)


def _wait_until_ready(server: Server) -> float:
    started = time.perf_counter()
    while time.perf_counter() - started < START_PATIENCE:
        if server.process.poll() is not None:
            raise ServerFailed(_obituary(server))
        with suppress(OSError, http.client.HTTPException, ServerFailed):
            server.get("/health")
            return time.perf_counter() - started
        time.sleep(POLL)
    raise ServerFailed(f"{server.name} was not ready after {START_PATIENCE:.0f} s:\n{server.log_tail()}")


def _obituary(server: Server) -> str:
    return f"{server.name} ended with status {server.process.returncode}:\n{server.log_tail()}"


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    with suppress(subprocess.TimeoutExpired):
        process.wait(0.5)  # its connections break a moment before it is gone
    return process.poll() is not None


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_PATIENCE)
    except subprocess.TimeoutExpired:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
