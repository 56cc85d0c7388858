from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamatrio.kv.packed import PAGE_RECORDS, PackedKV, page_sizes


def records(n: int) -> np.ndarray:
    return np.arange(n * 3, dtype=np.uint16).astype(np.uint8).reshape(n, 3)


def packed(n: int) -> PackedKV:
    data, pages, at = records(n), [], 0
    for size in page_sizes(n):
        pages.append(data[at : at + size].copy())
        at += size
    return PackedKV.from_pages(pages)


@given(st.integers(0, 200), st.lists(st.integers(0, 200), max_size=5))
def test_any_cuts_give_back_the_same_records_and_count_each_page_once(n: int, cuts: list[int]) -> None:
    whole = packed(n)
    assert whole.acquire() == n * 3
    parts = [whole]
    for cut in cuts:
        at = cut % len(parts)
        part = parts[at]
        head, tail = part.split(cut % (len(part) + 1))
        head.acquire()
        tail.acquire()
        assert part.release() == 0, "bytes that a part still uses were given up"
        parts[at : at + 1] = [head, tail]
    out = np.zeros((n, 3), np.uint8)
    at = 0
    for part in parts:
        part.copy_to(out[at : at + len(part)])
        at += len(part)
    assert (out == records(n)).all()
    assert sum(part.release() for part in parts) == n * 3


@given(st.integers(1, 200), st.data())
def test_a_range_is_copied_from_wherever_it_starts(n: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, n))
    out = np.zeros((data.draw(st.integers(0, n - start)), 3), np.uint8)
    packed(n).copy_to(out, start)
    assert (out == records(n)[start : start + len(out)]).all()


def test_cuts_and_copies_beyond_the_end_are_refused() -> None:
    with pytest.raises(ValueError, match="within 0 to 5"):
        packed(5).split(6)
    with pytest.raises(ValueError, match="at most 2"):
        packed(5).copy_to(np.zeros((3, 3), np.uint8), 3)


def test_pages_hold_exactly_what_is_there() -> None:
    assert page_sizes(0) == []
    assert page_sizes(PAGE_RECORDS + 1) == [PAGE_RECORDS, 1]
