"""Getting pages from the system before a step needs them.

Memory that was never touched costs nothing, and then a zeroed page at the first touch: on a virtual machine up to 3 ms
for a huge one. The first cells of a pool lie on two pages a layer, so the first prompt paid for all of these at once,
and so did, later on, all running streams when the cells in use reached the next ones. One thread asks for them ahead,
scratch first, then the pool in the order in which cells are given out, and takes its time while steps run. It starts
when the backend is ready: beside loading it makes that take half as long again.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from types import TracebackType
from typing import NamedTuple

_MADV_POPULATE_WRITE = 23
"""From Linux 5.14 on; older kernels say EINVAL, and pages come when they are touched."""
_PAGE = 4096
_STEP = 2 << 20
"""Bytes asked for at once, at their multiples: a huge page."""
_PAUSE_S = 0.03


class Region(NamedTuple):
    """Memory that begins on a huge page, or within one."""

    address: int
    n_bytes: int


class Populator:
    """A thread that asks for the pages of `regions`, in turns. A context manager; leaving it stops the thread."""

    def __init__(self, regions: Iterable[Region], are_steps_running: Callable[[], bool]) -> None:
        self._regions = regions
        self._are_steps_running = are_steps_running
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="llamatrio-populate", daemon=True)

    def __enter__(self) -> Populator:
        if sys.platform == "linux":
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closed = True
        self.join()

    def join(self) -> None:
        """Waits until all pages are there, or the system has refused."""
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        madvise = ctypes.CDLL(None).madvise
        for region in self._regions:
            if self._is_closed:
                return
            start = region.address // _PAGE * _PAGE
            size = region.address + region.n_bytes - start
            if madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_POPULATE_WRITE):
                return
            if self._are_steps_running():
                time.sleep(_PAUSE_S)


def in_turns(groups: Sequence[Sequence[Region]]) -> Iterator[Region]:
    """Group after group; within a group the first huge page of each region, then the second of each, ..."""
    for group in groups:
        for pages in zip_longest(*(_huge_pages(region) for region in group)):
            yield from (page for page in pages if page is not None)


def _huge_pages(region: Region) -> Iterator[Region]:
    at, end = region
    end += at
    while at < end:
        border = min(end, (at // _STEP + 1) * _STEP)
        yield Region(at, border - at)
        at = border
