"""Pages are there before anybody touches them."""

from __future__ import annotations

import ctypes
import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamatrio.backends.cpu.arena import Arena
from llamatrio.backends.cpu.populate import Populator, Region, in_turns

MIB = 1 << 20
PAGE = 4096
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")


def n_resident(memory: np.ndarray) -> int:
    """How many pages of `memory` (page-aligned) the system has given."""
    vector = np.zeros(memory.nbytes // PAGE, np.uint8)
    libc = ctypes.CDLL(None)
    libc.mincore(
        ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.nbytes), vector.ctypes.data_as(ctypes.c_void_p)
    )
    return int((vector & 1).sum())


@linux_only
def test_all_pages_are_there_and_nothing_is_overwritten() -> None:
    with Arena(16 * MIB) as arena:
        memory = arena.take(16 * MIB)
        memory[5 * MIB] = 7
        assert n_resident(memory) <= 2 * MIB // PAGE
        regions = [Region(arena.address, 7 * MIB + 100), Region(arena.address + 7 * MIB + 100, 9 * MIB - 100)]
        with Populator(in_turns([regions]), lambda: False) as populator:
            populator.join()
        assert n_resident(memory) == 16 * MIB // PAGE
        assert memory[5 * MIB] == 7
        assert memory.sum() == 7


@linux_only
def test_leaving_stops_it() -> None:
    reached, go_on = threading.Event(), threading.Event()

    def regions() -> object:
        yield Region(arena.address, PAGE)
        reached.set()
        go_on.wait(60)
        yield Region(arena.address + 8 * MIB, PAGE)

    with Arena(16 * MIB) as arena:
        memory = arena.take(16 * MIB)
        with Populator(regions(), lambda: False) as populator:
            reached.wait(60)
            populator._is_closed = True
            go_on.set()
        assert n_resident(memory[8 * MIB :]) == 0


@linux_only
def test_a_refusal_ends_it() -> None:
    with Populator([Region(PAGE, PAGE), Region(2 * PAGE, PAGE)], lambda: False) as populator:
        populator.join()


@given(st.lists(st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(0, 9 * MIB)), max_size=4), max_size=3))
def test_turns_cover_each_region_once_without_crossing_a_huge_page(groups: list[list[tuple[int, int]]]) -> None:
    regions = [[Region(*region) for region in group] for group in groups]
    pages = list(in_turns(regions))
    assert sum(page.n_bytes for page in pages) == sum(region.n_bytes for group in regions for region in group)
    for page in pages:
        assert page.n_bytes > 0
        assert page.address // (2 * MIB) == (page.address + page.n_bytes - 1) // (2 * MIB)
    for group in regions:
        for region in group:
            inside = [p for p in pages if region.address <= p.address < region.address + region.n_bytes]
            assert sum(p.n_bytes for p in inside) >= region.n_bytes


def test_a_group_goes_page_by_page() -> None:
    size = 2 * MIB
    pages = in_turns([[Region(0, size)], [Region(10 * size, 2 * size), Region(20 * size, size)]])
    assert [page.address // size for page in pages] == [0, 10, 20, 11]
