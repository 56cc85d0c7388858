"""The likeliest tokens of a row of logits, in one pass over what can matter.

While a segment of logits is still in cache, a kernel notes the largest of every 64 and the segment's sum of
exponentials. Selection then keeps a heap of the best k and skips each block of 64 whose largest cannot enter.
Order: descending logit, of equal logits the lower id first. Neither the order nor the sums depend on the number
of threads: segments have a fixed size.
"""

# Numba infers the types of compiled functions itself.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"

from __future__ import annotations

import math

from numba import int32, int64

from llamatrio.backends.cpu.native import inner, load_f32, load_i32, store_f32, store_i32

BLOCK = 64
"""Logits whose maximum is noted."""
SEGMENT = 4096
"""Logits whose exponentials are summed together; a multiple of BLOCK."""


@inner
def log_sum_exp(segments, n_segments):
    """From float32 [n_segments, 2] of (maximum, sum of exp(x - maximum)) at `segments`."""
    largest = load_f32(segments, 0)
    for i in range(1, n_segments):
        largest = max(largest, load_f32(segments, 2 * i))
    total = 0.0
    for i in range(n_segments):
        shift = float(load_f32(segments, 2 * i)) - float(largest)
        total += load_f32(segments, 2 * i + 1) * math.exp(shift)
    return float(largest) + math.log(total)


@inner
def select_top(logits, maxima, n, k, best, ids):
    """The k best of float32 [n] at `logits` into float32 [k] at `best` and int32 [k] at `ids`, sorted. 1 <= k <= n.

    maxima: float32 [ceil(n / BLOCK)], the largest of each block.
    """
    size = 0
    for block in range((n + BLOCK - 1) // BLOCK):
        # Later ids lose ties, so an equal logit cannot enter a full heap.
        if size == k and not load_f32(maxima, block) > load_f32(best, 0):
            continue
        for i in range(block * BLOCK, min(n, (block + 1) * BLOCK)):
            if size < k:
                _sift_up(best, ids, size, load_f32(logits, i), i)
                size += 1
            elif load_f32(logits, i) > load_f32(best, 0):
                _sift_down(best, ids, k, load_f32(logits, i), i)
    _sort(best, ids, k)


@inner
def kth_largest(logits, ids, n, k, best, best_ids):
    """The k-th largest of the logits at the n ids (int32); `best` and `best_ids` have room for k. 1 <= k <= n."""
    for i in range(n):
        index = int64(load_i32(ids, i))
        if i < k:
            _sift_up(best, best_ids, i, load_f32(logits, index), index)
        elif load_f32(logits, index) > load_f32(best, 0):
            _sift_down(best, best_ids, k, load_f32(logits, index), index)
    return load_f32(best, 0)


@inner
def _sort(best, ids, k):
    """A heap of k, from the best to the worst."""
    for last in range(k - 1, 0, -1):
        worst, worst_id = load_f32(best, 0), load_i32(ids, 0)
        _sift_down(best, ids, last, load_f32(best, last), int64(load_i32(ids, last)))
        _place(best, ids, last, worst, worst_id)


@inner
def _place(best, ids, at, value, index):
    store_f32(best, at, value)
    store_i32(ids, at, int32(index))


@inner
def _is_worse(value, index, other, other_index):
    return value < other or (value == other and index > other_index)


@inner
def _sift_up(best, ids, at, value, index):
    """Adds an element to the heap of `at` elements; its root is the worst."""
    while at > 0:
        parent = (at - 1) // 2
        above, above_id = load_f32(best, parent), int64(load_i32(ids, parent))
        if not _is_worse(value, index, above, above_id):
            break
        _place(best, ids, at, above, above_id)
        at = parent
    _place(best, ids, at, value, index)


@inner
def _sift_down(best, ids, size, value, index):
    """Replaces the root of the heap of `size` elements."""
    at = 0
    while 2 * at + 1 < size:
        child = 2 * at + 1
        below, below_id = load_f32(best, child), int64(load_i32(ids, child))
        if child + 1 < size:
            other, other_id = load_f32(best, child + 1), int64(load_i32(ids, child + 1))
            if _is_worse(other, other_id, below, below_id):
                child, below, below_id = child + 1, other, other_id
        if not _is_worse(below, below_id, value, index):
            break
        _place(best, ids, at, below, below_id)
        at = child
    _place(best, ids, at, value, index)
