"""Saves and restores: carries out the tickets that the scheduler issues, in a nursery of its own.

A save is, for each chunk that fits a staging buffer: gather on the device, wait for it, copy into pages. A device that
needs no staging gathers into the pages themselves. Then the ticket is committed, all at once. Saves take turns: several
at once would all end late, and those who wait for cells wait for the first. Whatever goes wrong ends in an abort: the
entry never was there, the cells are as before, and the server goes on. Only errors of the device and of memory are
expected; others are bugs and propagate.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import trio

from llamatrio.backends.base import Backend, StagingBuffer, UInt8Array
from llamatrio.config import MIB
from llamatrio.engine.completion import RunBlocking, all_completed, completed
from llamatrio.engine.staging import StagingPool
from llamatrio.engine.stats import Totals
from llamatrio.errors import BackendError
from llamatrio.kv.node import RestoreTicket, SaveTicket
from llamatrio.kv.packed import PackedKV, page_sizes
from llamatrio.kv.prompt_cache import PromptCache

_log = logging.getLogger("llamatrio.cache")

_PAGES_AT_ONCE = 4
"""Pages that a save or restore queues at a time where there is no staging: others get their turn in between."""


class Saver:
    """Owned by the engine; its tasks run in the saver nursery.

    on_restored(ticket, ok) tells the scheduler; wake() lets the decode task look again.
    """

    def __init__(
        self,
        backend: Backend,
        cache: PromptCache,
        staging: StagingPool | None,
        totals: Totals,
        *,
        run_copy: RunBlocking,
        on_restored: Callable[[RestoreTicket, bool], None],
        wake: Callable[[], None],
    ) -> None:
        self._backend = backend
        self._cache = cache
        self._staging = staging
        self._totals = totals
        self._run_copy = run_copy
        self._on_restored = on_restored
        self._wake = wake
        self._turn = trio.Lock()

    async def carry_out(self, ticket: SaveTicket | RestoreTicket) -> None:
        """Ends a ticket, one way or the other."""
        if isinstance(ticket, SaveTicket):
            await self.save(ticket)
        else:
            await self.restore(ticket)

    async def save(self, ticket: SaveTicket) -> None:
        """Copies the ticket's cells into host memory and commits it."""
        pages: list[UInt8Array] | None = None
        try:
            async with self._turn:
                pages = await self._gather_in_time(ticket)
        except (BackendError, MemoryError) as error:
            _log.error("failed to save %d tokens: %s", len(ticket.cells), error)
        finally:
            if pages is None:
                self._cache.abort_save(ticket)
            else:
                self._cache.commit_save(ticket, pages)
            self._wake()

    async def _gather_in_time(self, ticket: SaveTicket) -> list[UInt8Array]:
        """Gathers the ticket's cells, says so as llama-server does, and counts the time it took."""
        started = trio.current_time()
        _log.info("saving idle slot to prompt cache")
        _log.info(
            " - saving prompt with length %d, total state size = %.3f MiB (%d new tokens)",
            ticket.n_prefix,
            ticket.reserved_bytes / MIB,
            len(ticket.cells),
        )
        pages = await self._gather(ticket)
        seconds = trio.current_time() - started
        self._totals.save_seconds += seconds
        _log.info("prompt cache update took %.2f ms", seconds * 1000)
        return pages

    async def restore(self, ticket: RestoreTicket) -> None:
        """Copies the ticket's records into its cells."""
        started = trio.current_time()
        ok = False
        try:
            await self._scatter(ticket)
            ok = True
        except BackendError as error:
            _log.error("failed to restore %d tokens: %s", len(ticket.cells), error)
        finally:
            self._on_restored(ticket, ok)
            self._wake()
        seconds = trio.current_time() - started
        self._totals.restore_seconds += seconds
        if ok:
            _log.info("restored %d tokens from the prompt cache in %.2f ms", len(ticket.cells), seconds * 1000)

    async def _gather(self, ticket: SaveTicket) -> list[UInt8Array]:
        if self._staging is None:
            return await self._gather_into_pages(ticket)
        pages: list[UInt8Array] = []
        done = 0
        while done < len(ticket.cells):
            async with self._staging.acquire() as buffer:
                chunk = ticket.cells[done : done + buffer.capacity]
                done += len(chunk)
                gather = self._backend.gather_cells(chunk, buffer)
                await completed(gather.cells_free)
                if done == len(ticket.cells):
                    self._cache.unpin_save(ticket)
                await completed(gather.landed)
                pages += await self._run_copy(_copy_out, buffer, len(chunk))
        return pages

    async def _gather_into_pages(self, ticket: SaveTicket) -> list[UInt8Array]:
        n_bytes = self._backend.layout.record_bytes
        pages = [np.empty((size, n_bytes), np.uint8) for size in page_sizes(len(ticket.cells))]
        done = 0
        for first in range(0, len(pages), _PAGES_AT_ONCE):
            await trio.lowlevel.checkpoint_if_cancelled()
            gathers = []
            for page in pages[first : first + _PAGES_AT_ONCE]:
                gathers.append(self._backend.gather_cells(ticket.cells[done : done + len(page)], StagingBuffer(page)))
                done += len(page)
            await all_completed([gather.landed for gather in gathers])
        self._cache.unpin_save(ticket)
        return pages

    async def _scatter(self, ticket: RestoreTicket) -> None:
        if self._staging is None:
            await self._scatter_from_pages(ticket)
            return
        done = 0
        while done < len(ticket.cells):
            async with self._staging.acquire() as buffer:
                chunk = ticket.cells[done : done + buffer.capacity]
                await self._run_copy(_copy_in, ticket.records, done, buffer, len(chunk))
                done += len(chunk)
                await completed(self._backend.scatter_cells(buffer, chunk))

    async def _scatter_from_pages(self, ticket: RestoreTicket) -> None:
        pieces = list(_pieces(ticket.records, len(ticket.cells)))
        done = 0
        for first in range(0, len(pieces), _PAGES_AT_ONCE):
            scatters = []
            for piece in pieces[first : first + _PAGES_AT_ONCE]:
                cells = ticket.cells[done : done + len(piece)]
                scatters.append(self._backend.scatter_cells(StagingBuffer(piece), cells))
                done += len(piece)
            await all_completed(scatters)


def _pieces(records: tuple[PackedKV, ...], n: int) -> Iterator[UInt8Array]:
    """The first n records of all runs in a row, page by page."""
    for run in records:
        for part in run.slices:
            piece = part.records[:n]
            n -= len(piece)
            if len(piece):
                yield piece


def _copy_out(buffer: StagingBuffer, n: int) -> list[UInt8Array]:
    pages: list[UInt8Array] = []
    at = 0
    for size in page_sizes(n):
        pages.append(buffer.records[at : at + size].copy())
        at += size
    return pages


def _copy_in(records: tuple[PackedKV, ...], start: int, buffer: StagingBuffer, n: int) -> None:
    at = 0
    for part, first, count in _parts(records, start, n):
        part.copy_to(buffer.records[at : at + count], first)
        at += count


def _parts(records: tuple[PackedKV, ...], start: int, n: int) -> Iterator[tuple[PackedKV, int, int]]:
    """Which records of which run make up [start, start + n) of all of them in a row."""
    for part in records:
        first = min(start, len(part))
        count = min(len(part) - first, n)
        if count:
            yield part, first, count
        start -= first
        n -= count


class CopyThread:
    """One thread for the copies of saves and restores, which gives way to the step where the system lets it."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None

    def __enter__(self) -> CopyThread:
        self._executor = ThreadPoolExecutor(1, "llamatrio-copy", initializer=_lower_priority)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._executor is not None
        self._executor.shutdown()

    async def run(self, work: Callable[..., Any], *args: Any) -> Any:
        """Runs blocking work on the thread."""
        assert self._executor is not None
        return await completed(self._executor.submit(work, *args))


def _lower_priority() -> None:
    """Threads have priorities of their own on Linux; elsewhere this would slow the whole process."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
