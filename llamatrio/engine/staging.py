"""StagingPool: the bounded ring of buffers that cell records pass through."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import trio

from llamatrio.backends.base import StagingBuffer


class StagingPool:
    """Buffers that were allocated once. Whoever needs one waits its turn; that is what slows savers down, and
    nothing else does."""

    def __init__(self, buffers: Sequence[StagingBuffer]) -> None:
        if not buffers:
            raise ValueError("expected at least one staging buffer")
        self._free = list(buffers)
        self._n_free = trio.Semaphore(len(self._free), max_value=len(self._free))

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[StagingBuffer]:
        """A buffer for the length of the block. The block must not end while a copy into or out of it is under way."""
        async with self._n_free:
            buffer = self._free.pop()
            try:
                yield buffer
            finally:
                self._free.append(buffer)
