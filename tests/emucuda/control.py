"""Tests' handle on the emulated driver: settings, faults, holds, counts, trace and findings.

Labels name what the driver did:

    copy.h2d copy.d2h copy.d2d copy.h2h memset kernel:NAME graph.launch host module.load
    event.record event.wait sync.stream sync.event sync.context sync.implicit
    alloc.device alloc.device_pool alloc.pinned alloc.host_pool free.ordered free.synchronous

A pattern matches a label, and all that continue it with a dot, a colon or template arguments: `copy` means every
copy, `kernel` every launch.
"""

from __future__ import annotations

import ctypes
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

OUT_OF_MEMORY = 2
ILLEGAL_ADDRESS = 700
LAUNCH_FAILED = 719


class Finding(NamedTuple):
    """What a check found; the kernel ran on."""

    kind: str
    """stream-race, shared-race, uninitialised, shuffle-lane, missing-lane or cp-async-unwaited."""
    operation: str
    """Its label: kernel:NAME, copy.d2h, ..."""
    where: str
    """file.cu:12, or '' for a copy."""
    message: str
    count: int  # type: ignore[assignment]
    """How often; hides the tuple's own method of that name."""


class Call(NamedTuple):
    """One call of the driver, as traced."""

    api: str
    label: str
    thread: str
    """Name of the Python thread that called."""
    stream: int
    bytes: int
    result: int


class StreamState(NamedTuple):
    id: int
    queued: int
    done: int
    held: bool
    closing: bool


class Live(NamedTuple):
    """What exists now, for leak checks."""

    device_allocations: int
    pinned_allocations: int
    device_bytes: int
    peak_device_bytes: int
    streams: int
    events: int
    graphs: int


_NAMER = ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_char), ctypes.c_size_t)


def _name_thread(buffer: Any, room: int) -> None:
    name = threading.current_thread().name.encode()[: room - 1]
    ctypes.memmove(buffer, name + b"\0", len(name) + 1)


class Control:
    """The emulated driver that this process has loaded."""

    def __init__(self, library: Path) -> None:
        self._lib = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        for name in ("counts", "trace", "findings", "streams", "live", "last_error"):
            getattr(self._lib, f"emu_{name}").restype = ctypes.c_char_p
        self._lib.emu_set_delay.argtypes = [ctypes.c_char_p, ctypes.c_double]
        self._lib.emu_set_memory.argtypes = [ctypes.c_uint64]
        self._lib.emu_set_budget.argtypes = [ctypes.c_int, ctypes.c_long]
        self._lib.emu_stream_id.argtypes = [ctypes.c_void_p]
        self._lib.emu_host_access.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int]
        for name in ("emu_fail_call", "emu_fail_run"):
            getattr(self._lib, name).argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int]
        self._namer = _NAMER(_name_thread)
        self._lib.emu_set_thread_namer(self._namer)

    # ---- reports
    def counts(self) -> Counter[str]:
        """Calls by entry point and by label, and bytes as `<label>.bytes`."""
        return Counter(json.loads(self._lib.emu_counts()))

    def trace(self) -> list[Call]:
        """Calls since tracing was turned on, in order of their begin."""
        return [Call(**call) for call in json.loads(self._lib.emu_trace())]

    def findings(self) -> list[Finding]:
        return [Finding(**finding) for finding in json.loads(self._lib.emu_findings())]

    def take_findings(self) -> list[Finding]:
        """The findings so far, which are then forgotten."""
        found = self.findings()
        self._lib.emu_forget_findings()
        return found

    def streams(self) -> list[StreamState]:
        """Open streams in order of creation; id 0 is the legacy stream."""
        return [StreamState(**state) for state in json.loads(self._lib.emu_streams())]

    def live(self) -> Live:
        return Live(**json.loads(self._lib.emu_live()))

    def last_error(self) -> str:
        text: bytes = self._lib.emu_last_error()
        return text.decode()

    def context_error(self) -> str:
        """What broke the context, or ''."""
        return self.last_error() if self._lib.emu_context_error() else ""

    # ---- settings
    def reset(self) -> None:
        """Forgets counts, trace, findings, faults, delays and holds, and mends a broken context."""
        self._lib.emu_reset()
        self.set_tracing(False)
        self.set_thread_order(0)
        self.set_memory(8 << 30)
        self.set_patience(120)

    def forget_counts(self) -> None:
        self._lib.emu_forget_counts()

    def set_tracing(self, on: bool) -> None:
        self._lib.emu_set_tracing(int(on))

    def set_checked(self, on: bool) -> None:
        """Turns the checks on or off, once all streams have run dry."""
        self._lib.emu_set_checked(int(on))

    @contextmanager
    def checked(self) -> Iterator[None]:
        self.set_checked(True)
        try:
            yield
        finally:
            self.set_checked(False)

    def set_thread_order(self, order: int) -> None:
        """How threads of a block take turns: 0 ascending, 1 descending, else the seed of a random order."""
        self._lib.emu_set_thread_order(order)

    def set_workers(self, n: int) -> None:
        """Threads that run the blocks of a launch."""
        self._lib.emu_set_workers(n)

    def set_patience(self, seconds: float) -> None:
        """How long a wait may see nothing happen before it ends with an error (and breaks the context)."""
        self._lib.emu_set_patience(ctypes.c_double(seconds))

    def set_memory(self, nbytes: int) -> None:
        """Size of the device's memory."""
        self._lib.emu_set_memory(nbytes)

    def delay(self, pattern: str, seconds: float) -> None:
        """Makes each matching operation take so much longer; '' matches all."""
        self._lib.emu_set_delay(pattern.encode(), seconds)

    # ---- faults
    def fail_call(self, pattern: str, nth: int = 1, error: int = OUT_OF_MEMORY) -> None:
        """The nth call from now of an entry point, or of what a label pattern names, returns the error."""
        self._lib.emu_fail_call(pattern.encode(), nth, error)

    def fail_run(self, pattern: str, nth: int = 1, error: int = LAUNCH_FAILED) -> None:
        """The nth matching operation from now fails when it runs, which breaks the context."""
        self._lib.emu_fail_run(pattern.encode(), nth, error)

    # ---- holds
    def stream_id(self, stream: Any) -> int:
        """Of a cuda.core Stream, a handle, or an id as `streams()` gives it."""
        if isinstance(stream, int) and stream < 1 << 20:
            return stream
        handle = int(getattr(stream, "handle", stream))
        found: int = self._lib.emu_stream_id(handle)
        return found

    def hold(self, stream: Any) -> None:
        """The stream starts nothing more until it is released."""
        self._set_budget(stream, 0)

    def release(self, stream: Any) -> None:
        self._set_budget(stream, -1)

    def step(self, stream: Any, operations: int) -> None:
        """A held stream starts so many more operations; records and waits count, too."""
        self._set_budget(stream, operations)

    @contextmanager
    def held(self, stream: Any) -> Iterator[None]:
        self.hold(stream)
        try:
            yield
        finally:
            self.release(stream)

    def _set_budget(self, stream: Any, operations: int) -> None:
        if not self._lib.emu_set_budget(self.stream_id(stream), operations):
            raise ValueError(f"no stream {stream}")

    def settle(self) -> None:
        """Waits until all streams have run dry. Puts nothing in order, so races stay visible."""
        self._lib.emu_settle()

    # ---- memory
    def host_reads(self, address: int, nbytes: int) -> None:
        """Tells the checker that the host reads pinned memory now."""
        self._lib.emu_host_access(address, nbytes, 0)

    def host_writes(self, address: int, nbytes: int) -> None:
        self._lib.emu_host_access(address, nbytes, 1)

    # ---- modules
    def register(self, cubin: bytes, folder: Path) -> None:
        """Says that a cubin's PTX is module.ptx in the folder."""
        self._lib.emu_register(cubin, str(folder).encode())

    def set_kernel_builder(self, folder: Path, command: str) -> None:
        self._lib.emu_set_kernel_builder(str(folder).encode(), command.encode())
