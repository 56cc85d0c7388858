"""Cells to pinned host memory and back: the pipeline of saves and restores.

A gather is, whatever the number of cells, layers and fragments:

    compute:  upload the list of cells, gather_cells -> device staging, record `moved`
    copy:                                             wait for `moved`, copy -> pinned staging, record `landed`

The copy stream waits for the compute stream, never the other way round, so a slow copy holds up no step. The cells
are free as soon as the gather is queued: whatever writes them afterwards is queued behind it, a step on the compute
stream, or a scatter on the copy stream behind its wait for `moved`. So `cells_free` is done at once.

A scatter runs on the copy stream alone: upload the list and the records, scatter_cells, record `landed`. No step may
use its cells until it has completed, and completion is seen by the host, which orders it before every later step.

Everything a transfer needs lies in its staging buffer: nothing is allocated, and nothing is overwritten while a copy
may still read it, since whoever holds the buffer keeps it until the transfer has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from cuda.core import Event

from llamatrio.backends.base import Gather, StagingBuffer
from llamatrio.backends.cuda.compiler import KernelLoader
from llamatrio.backends.cuda.completion import Completions, failed_future, running_future
from llamatrio.backends.cuda.device import CUDAError, Gpu, driver_errors, load_now
from llamatrio.backends.cuda.kernels import cells as kernels
from llamatrio.backends.cuda.kernels.launcher import DevicePointer, Launcher
from llamatrio.backends.cuda.memory import DeviceArena, PinnedMemory, aligned, device_arena, pinned_memory
from llamatrio.errors import BackendError
from llamatrio.sched.types import Int32Array


@dataclass(slots=True, eq=False)
class CudaStaging(StagingBuffer):
    """Pinned records with their counterpart on the device, and a list of cells in both."""

    pinned: PinnedMemory
    """The records, and from `cells_at` on the list."""
    arena: DeviceArena
    """As `pinned`."""
    cells_at: int
    moved: Event
    landed: Event

    @property
    def records_address(self) -> DevicePointer:
        """Of the records on the device."""
        return self.arena.address

    @property
    def cells_address(self) -> DevicePointer:
        """Of the list of cells on the device."""
        return self.arena.address + self.cells_at


class CellTransfer:
    """Moves cells of one pool. Owned by the backend, called from its thread."""

    def __init__(
        self, gpu: Gpu, loader: KernelLoader, pool: DevicePointer, shape: kernels.PoolShape, copies: Completions
    ) -> None:
        self._gpu, self._pool, self._shape, self._copies = gpu, pool, shape, copies
        self._on_compute, self._on_copy = Launcher(loader, gpu.compute), Launcher(loader, gpu.copy)

    @property
    def record_bytes(self) -> int:
        """Bytes of a cell's record."""
        return self._shape.n_layer * (self._shape.k_row_bytes + self._shape.v_row_bytes)

    def load_kernels(self) -> None:
        """Compiles and loads what transfers launch, so that none does it later."""
        for name in ("gather_cells", "scatter_cells"):
            load_now(self._on_compute.loader.kernel(name))

    def new_staging(self, n_records: int, stack: ExitStack) -> CudaStaging:
        """A buffer that lives as long as `stack`. Raises BackendError when memory is short."""
        cells_at = aligned(n_records * self.record_bytes)
        what = f"a staging buffer of {n_records} cells"
        pinned = stack.enter_context(pinned_memory(cells_at + 4 * n_records, what))
        arena = stack.enter_context(device_arena(self._gpu, cells_at + 4 * n_records, what))
        records = pinned.bytes[: n_records * self.record_bytes].reshape(n_records, -1)
        moved, landed = self._gpu.new_event(stack), self._gpu.new_event(stack)
        return CudaStaging(records, pinned, arena, cells_at, moved, landed)

    def gather(self, cells: Int32Array, staging: CudaStaging) -> Gather:
        """Queues cells [n] into the first n records."""
        if not len(cells):
            return Gather(_done(), _done())
        landed = self._queue(self._enqueue_gather, "saving cells failed", cells, staging)
        return Gather(landed if landed.done() and landed.exception() else _done(), landed)

    def scatter(self, staging: CudaStaging, cells: Int32Array) -> Future[None]:
        """Queues the first n records into cells [n]."""
        if not len(cells):
            return _done()
        return self._queue(self._enqueue_scatter, "restoring cells failed", cells, staging)

    def _queue(
        self, enqueue: Callable[[int, CudaStaging], None], what: str, cells: Int32Array, staging: CudaStaging
    ) -> Future[None]:
        error: BackendError | None = None
        try:
            with driver_errors(what):
                _cells_of(staging, len(cells))[:] = cells
                enqueue(len(cells), staging)
        except BackendError as raised:
            error = raised
            if not self._fence(staging):
                return failed_future(error)
        return self._copies.future(staging.landed, lambda: None, error)

    def _enqueue_gather(self, n: int, staging: CudaStaging) -> None:
        compute, copy = self._gpu.compute, self._gpu.copy
        staging.pinned.upload(staging.cells_at, 4 * n, staging.arena, staging.cells_address, compute)
        kernels.gather_cells(
            self._on_compute, self._pool, staging.cells_address, staging.records_address, n=n, shape=self._shape
        )
        compute.record(staging.moved)
        copy.wait(staging.moved)
        staging.pinned.download(0, n * self.record_bytes, staging.arena, staging.records_address, copy)
        copy.record(staging.landed)

    def _enqueue_scatter(self, n: int, staging: CudaStaging) -> None:
        copy = self._gpu.copy
        staging.pinned.upload(staging.cells_at, 4 * n, staging.arena, staging.cells_address, copy)
        staging.pinned.upload(0, n * self.record_bytes, staging.arena, staging.records_address, copy)
        kernels.scatter_cells(
            self._on_copy, self._pool, staging.cells_address, staging.records_address, n=n, shape=self._shape
        )
        copy.record(staging.landed)

    def _fence(self, staging: CudaStaging) -> bool:
        """Records `landed` behind whatever a failed transfer had enqueued; False where not even that works."""
        try:
            self._gpu.compute.record(staging.moved)
            self._gpu.copy.wait(staging.moved)
            self._gpu.copy.record(staging.landed)
        except CUDAError:
            return False
        return True


def _cells_of(staging: CudaStaging, n: int) -> Int32Array:
    """The list in pinned memory."""
    return staging.pinned.bytes[staging.cells_at : staging.cells_at + 4 * n].view(np.int32)


def _done() -> Future[None]:
    future: Future[None] = running_future()
    future.set_result(None)
    return future
