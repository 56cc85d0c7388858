"""What the engine asks of a device.

A backend has two queues, as a GPU has two streams: *compute*, on which steps run in order, and *copy*, on which
cells move to and from host memory. Every operation is queued without blocking and returns a `Future` that
completes from a thread of the backend; nobody waits for a queue as a whole.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from llamatrio.model.spec import KVLayout, ModelSpec
from llamatrio.sched.types import Batch, Int32Array, StepOutput

UInt8Array = NDArray[np.uint8]


@dataclass(slots=True, eq=False)
class StagingBuffer:
    """Host memory for cell records. Where a device asks for staging: pinned, allocated once, by the backend, and owned
    by the engine's StagingPool. Elsewhere any memory will do, such as the cache's own pages.
    """

    records: UInt8Array
    """[capacity, record_bytes]"""

    @property
    def capacity(self) -> int:
        """Records that fit."""
        return int(self.records.shape[0])


class Gather(NamedTuple):
    """A gather in flight."""

    cells_free: Future[None]
    """Done when the cells' bytes have been read: they may be overwritten."""
    landed: Future[None]
    """Done when the records are in the staging buffer."""


class Backend(Protocol):
    """A device with a model loaded. Methods are called from one thread (the engine's)."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def layout(self) -> KVLayout: ...

    @property
    def n_cells(self) -> int:
        """Size of the KV pool in cells."""
        ...

    @property
    def max_rows(self) -> int:
        """Most rows a batch may have."""
        ...

    @property
    def device(self) -> str:
        """One line for the log: what runs the model."""
        ...

    @property
    def needs_staging(self) -> bool:
        """Whether cells move only to and from buffers that `new_staging` made."""
        ...

    @property
    def takes_every_core(self) -> bool:
        """Whether a step keeps all cores that this process may use busy, so that nothing else runs meanwhile."""
        ...

    def forward(self, batch: Batch) -> Future[StepOutput]:
        """Queues a step on compute. Fails with BackendError; the KV cells written by a failed step are undefined."""
        ...

    def gather_cells(self, cells: Int32Array, staging: StagingBuffer) -> Gather:
        """Queues on copy, ordered after every step queued so far: records of `cells[i]` into `staging.records[i]`."""
        ...

    def scatter_cells(self, staging: StagingBuffer, cells: Int32Array) -> Future[None]:
        """Queues on copy: `staging.records[i]` into `cells[i]`, which no queued step may read or write."""
        ...

    def new_staging(self, n_records: int) -> StagingBuffer:
        """Allocates a staging buffer (slow where memory is pinned: call it at start-up only)."""
        ...

    def close(self) -> None:
        """Waits for what is queued and frees the device. Idempotent."""
        ...
