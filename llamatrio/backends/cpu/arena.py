"""One private block of memory for weights, cells and scratch.

Huge pages matter: weights are read in order, once a step, and the page walks of 4 KiB pages cost up to half of the
bandwidth. The kernel gives huge pages to private anonymous memory that asks for them (Python's own mmap(-1) is
shared and gets none). populate.py has them in place before a step needs them.
"""

from __future__ import annotations

import contextlib
import mmap
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from llamatrio.errors import BackendError

ALIGNMENT = 64
_HUGE_PAGE = 2 << 20


class Arena:
    """`n_bytes` of zeroed memory, handed out from the front and freed as a whole. A context manager."""

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        self._next = 0
        self._base = 0
        self._memory: mmap.mmap | None = None
        self._bytes: NDArray[np.uint8] = np.empty(0, np.uint8)

    def __enter__(self) -> Arena:
        size = self.n_bytes + _HUGE_PAGE
        try:
            self._memory = _private_map(size)
        except OSError as error:
            raise BackendError(f"cannot reserve {size >> 20} MiB of memory: {error.strerror}") from error
        whole = np.frombuffer(self._memory, np.uint8)
        start = -whole.ctypes.data % _HUGE_PAGE
        self._bytes = whole[start : start + self.n_bytes]
        self._base = self._bytes.ctypes.data
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The mapping itself goes with the last array that was handed out: closing it earlier would pull the
        # memory from under whoever still looks at a result.
        self._bytes = np.empty(0, np.uint8)
        self._memory = None

    @property
    def address(self) -> int:
        """Of the first byte: on the border of a huge page."""
        return self._base

    @property
    def n_free(self) -> int:
        """Bytes not yet handed out."""
        return self.n_bytes - self._next

    def take(self, n_bytes: int) -> NDArray[np.uint8]:
        """The next `n_bytes`, aligned to 64 and zero: uint8 [n_bytes].

        Raises:
            ValueError: more was asked for than is left; the plan that sized the arena was wrong.
        """
        if self._memory is None:
            raise ValueError("expected an open arena")
        if n_bytes < 0 or padded(n_bytes) > self.n_free:
            raise ValueError(f"expected at most {self.n_free} bytes, not {n_bytes}")
        start = self._next
        self._next += padded(n_bytes)
        return self._bytes[start : start + n_bytes]


def padded(n_bytes: int) -> int:
    """What an allocation of `n_bytes` takes from an arena."""
    return -(-n_bytes // ALIGNMENT) * ALIGNMENT


def _private_map(size: int) -> mmap.mmap:
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, size)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them: ordinary pages work too
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
