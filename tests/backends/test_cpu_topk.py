"""The selection of the likeliest tokens against a full sort."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from llamatrio.backends.cpu import topk
from llamatrio.backends.cpu.topk import BLOCK


@njit
def select_top(logits, maxima, n, k, values, ids):
    topk.select_top(logits, maxima, n, k, values, ids)


@njit
def log_sum_exp(segments, n_segments):
    return topk.log_sum_exp(segments, n_segments)


def selected(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    n_blocks = -(-len(logits) // BLOCK)
    padding = np.full(n_blocks * BLOCK - len(logits), -np.inf, np.float32)
    maxima = np.concatenate([logits, padding]).reshape(n_blocks, BLOCK).max(axis=1)
    values, ids = np.empty(k, np.float32), np.empty(k, np.int32)
    select_top(logits.ctypes.data, maxima.ctypes.data, len(logits), k, values.ctypes.data, ids.ctypes.data)
    return values, ids


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.integers(1, 4), st.integers(0, 2**31), st.data())
def test_selects_what_a_stable_sort_puts_first(n: int, n_levels: int, seed: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, min(n, 256)))
    # Few levels: many ties, whose order is by id.
    logits = np.random.default_rng(seed).integers(0, 10**n_levels, n).astype(np.float32)
    values, ids = selected(logits, k)
    expected = np.argsort(-logits, kind="stable")[:k]
    assert ids.tolist() == expected.tolist()
    assert values.tolist() == logits[expected].tolist()


@pytest.mark.parametrize("k", [1, 40, 256])
def test_selects_from_a_large_vocabulary(k: int) -> None:
    logits = np.random.default_rng(k).standard_normal(49_152).astype(np.float32)
    _, ids = selected(logits, k)
    assert ids.tolist() == np.argsort(-logits, kind="stable")[:k].tolist()


def test_sum_of_exponentials_holds_for_distant_segments() -> None:
    parts = np.array([[5.0, 2.0], [-200.0, 3.0], [6.0, 1.5]], np.float32)
    expected = np.logaddexp(5 + np.log(2.0), 6 + np.log(1.5))
    assert log_sum_exp(parts.ctypes.data, 3) == pytest.approx(expected, abs=1e-6)
