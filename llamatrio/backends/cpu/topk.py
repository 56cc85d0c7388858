"""The likeliest tokens of a row of logits, in one pass over what can matter.

While a segment of logits is still in cache, a kernel notes the largest of every 64 and the segment's sum of
exponentials. Selection then keeps a heap of the best k and skips each block of 64 whose largest cannot enter.
Order: descending logit, of equal logits the lower id first. Neither the order nor the sums depend on the number
of threads: segments have a fixed size.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"

from __future__ import annotations

import math

from numba import njit

from llamatrio.backends.cpu.native import f32_at, i32_at

BLOCK = 64
"""Logits whose maximum is noted."""
SEGMENT = 4096
"""Logits whose exponentials are summed together; a multiple of BLOCK."""


@njit
def log_sum_exp(segments, n_segments):
    """From float32 [n_segments, 2] of (maximum, sum of exp(x - maximum)) at `segments`."""
    parts = f32_at(segments, 2 * n_segments)
    largest = parts[0]
    for i in range(1, n_segments):
        largest = max(largest, parts[2 * i])
    total = 0.0
    for i in range(n_segments):
        total += parts[2 * i + 1] * math.exp(float(parts[2 * i]) - float(largest))
    return float(largest) + math.log(total)


@njit
def select_top(logits, maxima, n, k, out_logits, out_ids):
    """The k best of float32 [n] at `logits` into float32 [k] and int32 [k], sorted. 1 <= k <= n.

    maxima: float32 [ceil(n / BLOCK)], the largest of each block.
    """
    values, block_max = f32_at(logits, n), f32_at(maxima, (n + BLOCK - 1) // BLOCK)
    best, ids = f32_at(out_logits, k), i32_at(out_ids, k)
    size = 0
    for block in range((n + BLOCK - 1) // BLOCK):
        # Later ids lose ties, so an equal logit cannot enter a full heap.
        if size == k and not block_max[block] > best[0]:
            continue
        for i in range(block * BLOCK, min(n, (block + 1) * BLOCK)):
            if size < k:
                _sift_up(best, ids, size, values[i], i)
                size += 1
            elif values[i] > best[0]:
                _sift_down(best, ids, k, values[i], i)
    for last in range(k - 1, 0, -1):
        worst, worst_id = best[0], ids[0]
        _sift_down(best, ids, last, best[last], ids[last])
        best[last], ids[last] = worst, worst_id


@njit(inline="always")
def _is_worse(value, index, other, other_index):
    return value < other or (value == other and index > other_index)


@njit
def _sift_up(best, ids, at, value, index):
    """Adds an element to the heap of `at` elements; its root is the worst."""
    while at > 0:
        parent = (at - 1) // 2
        if not _is_worse(value, index, best[parent], ids[parent]):
            break
        best[at], ids[at] = best[parent], ids[parent]
        at = parent
    best[at], ids[at] = value, index


@njit
def _sift_down(best, ids, size, value, index):
    """Replaces the root of the heap of `size` elements."""
    at = 0
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and _is_worse(best[child + 1], ids[child + 1], best[child], ids[child]):
            child += 1
        if not _is_worse(best[child], ids[child], value, index):
            break
        best[at], ids[at] = best[child], ids[child]
        at = child
    best[at], ids[at] = value, index
