"""Packed KV: records of cells in host memory, cut at any token without copying.

A record holds one cell: K and V of every layer (`KVLayout`). Records are kept in pages of at most PAGE_RECORDS, made
exactly as large as what they hold. A `PackedKV` is a run of records over one or more pages. When a run is split, both
parts may use the page the cut falls into; the page is counted once and lives as long as either part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

PAGE_RECORDS = 64
"""Records to a page: small enough that giving up a part of a conversation frees its memory, large enough that a page
of a small model (10 to 30 KB a record) is worth a memcpy of its own."""

UInt8Array = NDArray[np.uint8]


class Page:
    """Records in one piece of memory, shared by the runs that were cut from it."""

    __slots__ = ("n_users", "records")

    def __init__(self, records: UInt8Array) -> None:
        self.records = records
        """[n, record_bytes]"""
        self.n_users = 0

    @property
    def nbytes(self) -> int:
        """Bytes this page occupies."""
        return self.records.nbytes


@dataclass(frozen=True, slots=True)
class PageSlice:
    """Records [start, stop) of a page."""

    page: Page
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def records(self) -> UInt8Array:
        """[stop - start, record_bytes], a view."""
        return self.page.records[self.start : self.stop]


@dataclass(frozen=True, slots=True, eq=False)
class PackedKV:
    """A run of records, in position order."""

    slices: tuple[PageSlice, ...]

    def __len__(self) -> int:
        return sum(len(s) for s in self.slices)

    @classmethod
    def from_pages(cls, pages: Sequence[UInt8Array]) -> PackedKV:
        """A run over whole new pages, each [n, record_bytes]."""
        return cls(tuple(PageSlice(Page(records), 0, len(records)) for records in pages))

    def split(self, n: int) -> tuple[PackedKV, PackedKV]:
        """The first n records and the rest; no bytes move."""
        if not 0 <= n <= len(self):
            raise ValueError(f"expected a cut within 0 to {len(self)} records, not {n}")
        head: list[PageSlice] = []
        tail: list[PageSlice] = []
        for part in self.slices:
            cut = min(max(n, 0), len(part))
            if cut:
                head.append(PageSlice(part.page, part.start, part.start + cut))
            if cut < len(part):
                tail.append(PageSlice(part.page, part.start + cut, part.stop))
            n -= len(part)
        return PackedKV(tuple(head)), PackedKV(tuple(tail))

    def copy_to(self, out: UInt8Array, start: int = 0) -> None:
        """Copies records [start, start + len(out)) into out [n, record_bytes]."""
        _, rest = self.split(start)
        at = 0
        for part in rest.slices:
            n = min(len(part), len(out) - at)
            out[at : at + n] = part.records[:n]
            at += n
            if at == len(out):
                return
        if at != len(out):
            raise ValueError(f"expected at most {len(self) - start} records to be asked for, not {len(out)}")

    def acquire(self) -> int:
        """Counts a user on every page; returns the bytes of pages that had none."""
        return sum(p.nbytes for p in self.pages() if _count(p, 1) == 1)

    def release(self) -> int:
        """Takes a user off every page; returns the bytes of pages left without one."""
        return sum(p.nbytes for p in self.pages() if _count(p, -1) == 0)

    def pages(self) -> Iterator[Page]:
        """The pages it lies on, each once."""
        return (s.page for s in self.slices)


def _count(page: Page, change: int) -> int:
    page.n_users += change
    assert page.n_users >= 0, "a page was released more often than it was acquired"
    return page.n_users


def page_sizes(n_records: int) -> list[int]:
    """How n records are divided into pages."""
    full, rest = divmod(n_records, PAGE_RECORDS)
    return [PAGE_RECORDS] * full + ([rest] if rest else [])
