"""Memory, all of it allocated at start: arenas on the device, and pinned buffers on the host.

Pinning and allocating take milliseconds and may wait for the whole device, so nothing here is called while the server
runs. Owners are context managers; on leaving, whatever used the memory must have run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import numpy as np
from cuda.core import Buffer, LegacyPinnedMemoryResource, Stream
from numpy.typing import NDArray

from llamatrio.backends.cuda.device import CUDAError, Gpu, driver_errors
from llamatrio.backends.cuda.kernels.launcher import DevicePointer

ALIGNMENT = 256
MIB = 1 << 20


def aligned(nbytes: int) -> int:
    """Bytes that a piece of `nbytes` takes in an arena."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class DeviceArena:
    """One allocation on the device, handed out front to back."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self._used = 0

    @property
    def address(self) -> DevicePointer:
        """Of its first byte."""
        return int(self._buffer.handle)

    @property
    def nbytes(self) -> int:
        """All of it."""
        return int(self._buffer.size)

    @property
    def n_free(self) -> int:
        """Bytes not handed out yet."""
        return self.nbytes - self._used

    def take(self, nbytes: int) -> DevicePointer:
        """Address of the next `nbytes` bytes, on a multiple of 256."""
        assert aligned(nbytes) <= self.n_free, "the plan of the arena is wrong"
        address = self.address + self._used
        self._used += aligned(nbytes)
        return address

    def view(self, address: DevicePointer, nbytes: int) -> Buffer:
        """A part as a buffer to copy from or to."""
        return Buffer.from_handle(address, nbytes, owner=self._buffer)


class PinnedMemory:
    """One pinned allocation on the host."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self.bytes: NDArray[np.uint8] = np.from_dlpack(buffer).view(np.uint8)
        """[nbytes]"""

    def view(self, start: int, nbytes: int) -> Buffer:
        """A part as a buffer to copy from or to."""
        return Buffer.from_handle(int(self._buffer.handle) + start, nbytes, owner=self._buffer)

    def upload(self, start: int, nbytes: int, arena: DeviceArena, to: DevicePointer, stream: Stream) -> None:
        """Enqueues one copy from here to the device."""
        arena.view(to, nbytes).copy_from(self.view(start, nbytes), stream=stream)

    def download(self, start: int, nbytes: int, arena: DeviceArena, source: DevicePointer, stream: Stream) -> None:
        """Enqueues one copy from the device to here."""
        arena.view(source, nbytes).copy_to(self.view(start, nbytes), stream=stream)


@contextmanager
def device_arena(gpu: Gpu, nbytes: int, what: str) -> Iterator[DeviceArena]:
    """Device memory for the length of the block. Raises BackendError, naming `what` it was for."""
    failure = f"no {-(-nbytes // MIB)} MiB of device memory for {what}"
    with driver_errors(failure):
        buffer = gpu.device.allocate(aligned(max(nbytes, 1)), stream=gpu.compute)
    try:
        with ExitStack() as stack, driver_errors(failure):
            allocated = gpu.new_event(stack)  # it happens in the order of the compute stream
            gpu.compute.record(allocated)
            gpu.copy.wait(allocated)
        yield DeviceArena(buffer)
    finally:
        with suppress(CUDAError):  # of a broken context, which has nothing left to free
            buffer.close(gpu.compute)


@contextmanager
def pinned_memory(nbytes: int, what: str) -> Iterator[PinnedMemory]:
    """Pinned host memory for the length of the block. Raises BackendError, naming `what` it was for."""
    with driver_errors(f"no {-(-nbytes // MIB)} MiB of pinned memory for {what}"):
        buffer = LegacyPinnedMemoryResource().allocate(max(nbytes, 1))
    try:
        yield PinnedMemory(buffer)
    finally:
        with suppress(CUDAError):  # of a broken context, which has nothing left to free
            buffer.close()
