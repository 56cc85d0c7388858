"""Attention kernels against NumPy, over scattered cells."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llamatrio.backends.cpu import attention as att
from llamatrio.backends.cpu import attention_states as states
from llamatrio.backends.cpu import kv_rows, ops
from llamatrio.backends.cpu.compile import compile_kernel, python_function
from llamatrio.backends.cpu.levels import Level
from llamatrio.backends.cpu.reference import kv_round
from llamatrio.model.spec import KVType
from tests import emuamx

LEVELS = pytest.mark.parametrize("level", emuamx.levels(), ids=lambda level: level.name)


def kernel(name: str, emit: Any, n_args: int, level: Level) -> Any:
    return python_function(compile_kernel(name, emit, level), n_args)


def filled_pool(rows: np.ndarray, kind: KVType, level: Level, *, is_key: bool) -> np.ndarray:
    """Rows [n_cells, n_head_kv, head_dim] stored by the kernels: uint8 [n_cells, row bytes]."""
    n_cells, n_head_kv, head_dim = rows.shape
    pool = np.zeros((n_cells + 1, kv_rows.row_bytes(kind, n_head_kv, head_dim)), np.uint8)
    n = n_head_kv * head_dim
    if kind == "f16":
        store = kernel("store_f16", ops.store_f16, 3, level)
    else:
        name, emit = ("store_q8_k", ops.store_q8_k) if is_key else ("store_q8_v", ops.store_q8_v)
        store = kernel(name, emit, 4, level)
    for cell, row in enumerate(rows):
        at = pool[cell].ctypes.data
        if kind == "f16":
            store(row.ctypes.data, at, n)
        else:
            store(row.ctypes.data, at, at + n, n)
    return pool


def softmax_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, cap: float) -> np.ndarray:
    scores = q.astype(np.float64) @ k.astype(np.float64).T
    if cap:
        scores = cap * np.tanh(scores / cap)
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    return (p / p.sum(axis=1, keepdims=True)) @ v.astype(np.float64)


class Attention:
    """One row's attention for one batch of heads, chunk by chunk."""

    def __init__(self, shape: kv_rows.AttentionShape, level: Level) -> None:
        self.shape, self.cap = shape, 3.0 if shape.has_softcap else 0.0
        self.attend = kernel(shape.name, att.attend(shape), 11, level)
        self.merge = kernel(f"merge_{shape.head_dim}", states.merge_states(shape.head_dim), 3, level)
        self.finish = kernel(f"finish_{shape.head_dim}", states.finish_states(shape.head_dim), 3, level)
        self.quantize = (
            kernel(f"quantize_query_{shape.head_dim}", att.quantize_query(shape.head_dim), 3, level)
            if shape.head_dim % 32 == 0
            else None
        )

    def __call__(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, cells: np.ndarray, head: int) -> np.ndarray:
        shape = self.shape
        query = q
        if shape.type_k == "q8_0":
            query = np.zeros(shape.n_heads * att.query_bytes("q8_0", shape.head_dim), np.uint8)
            self.quantize(q.ctypes.data, query.ctypes.data, shape.n_heads)
        state, part = (np.zeros(shape.n_heads * states.state_bytes(shape.head_dim), np.uint8) for _ in range(2))
        scratch = np.zeros(att.scratch_bytes(shape), np.uint8)
        for first in range(0, len(cells), kv_rows.CHUNK):
            chunk = cells[first : first + kv_rows.CHUNK]
            into = part if first else state
            self.attend(
                query.ctypes.data, k.ctypes.data, v.ctypes.data, chunk.ctypes.data, len(chunk), into.ctypes.data,
                scratch.ctypes.data, head, ops.f32_bits(self.cap), chunk.ctypes.data, len(chunk),
            )  # fmt: skip
            if first:
                self.merge(state.ctypes.data, part.ctypes.data, shape.n_heads)
        out = np.zeros((shape.n_heads, shape.head_dim), np.float32)
        self.finish(state.ctypes.data, out.ctypes.data, shape.n_heads)
        return out


CASES = [
    (64, 3, 3, "f16", "f16", False),
    (32, 2, 2, "f16", "f16", True),
    (128, 1, 2, "f16", "f16", False),
    (80, 2, 1, "f16", "f16", False),
    (256, 1, 1, "f16", "q8_0", False),
    (64, 3, 3, "q8_0", "q8_0", False),
    (32, 2, 2, "q8_0", "f16", True),
    (96, 2, 1, "q8_0", "q8_0", False),
]


@LEVELS
@pytest.mark.parametrize(("head_dim", "n_head_kv", "n_heads", "type_k", "type_v", "softcap"), CASES)
def test_attention_over_scattered_cells(
    level: Level, head_dim: int, n_head_kv: int, n_heads: int, type_k: KVType, type_v: KVType, softcap: bool
) -> None:
    rng = np.random.default_rng(head_dim)
    shape = kv_rows.AttentionShape(head_dim, n_head_kv, n_heads, type_k, type_v, softcap)
    attention = Attention(shape, level)
    k, v = rng.standard_normal((2, 300, n_head_kv, head_dim), np.float32)
    k_pool, v_pool = filled_pool(k, type_k, level, is_key=True), filled_pool(v, type_v, level, is_key=False)
    head = n_head_kv - 1
    k_kept, v_kept = kv_round(k, type_k)[:, head], kv_round(v, type_v)[:, head]
    q = rng.standard_normal((n_heads, head_dim), np.float32) / np.float32(np.sqrt(head_dim))
    for n in (1, 2, 15, 16, 17, 128, 129, 290):
        cells = rng.permutation(300)[:n].astype(np.int32)
        out = attention(q, k_pool, v_pool, cells, head)
        expected = softmax_attention(q, k_kept[cells], v_kept[cells], attention.cap)
        # A 15-bit query moves a score by about 1e-4; with f16 only the order of summation differs.
        tolerance = 2e-4 if type_k == "q8_0" else 1e-5
        np.testing.assert_allclose(out, expected, atol=tolerance)


@LEVELS
def test_a_score_far_below_the_largest_weighs_nothing(level: Level) -> None:
    shape = kv_rows.AttentionShape(64, 1, 1, "f16", "f16", False)
    k, v = np.zeros((2, 200, 1, 64), np.float32)
    k[:, 0, 0] = np.linspace(-300, 300, 200)
    v[:, 0, :] = np.arange(200)[:, None]
    pools = [filled_pool(x, "f16", level, is_key=True) for x in (k, v)]
    q = np.zeros((1, 64), np.float32)
    q[0, 0] = 100
    out = Attention(shape, level)(q, *pools, np.arange(200, dtype=np.int32), 0)
    np.testing.assert_array_equal(out, 199)


@LEVELS
@pytest.mark.parametrize("emit", [ops.store_q8_k, ops.store_q8_v], ids=["k", "v"])
def test_q8_rows_keep_their_values(level: Level, emit: Any) -> None:
    rng = np.random.default_rng(3)
    rows = rng.standard_normal((8, 32)).astype(np.float32)
    rows[0] = 0
    rows[1, 5] = 1000
    rows[2] = 1e-8
    rows[3] *= 0.008
    rows[4] *= 1e-4
    is_key = emit is ops.store_q8_k
    store = kernel(emit.__name__, emit, 4, level)
    codes, scales = np.zeros((8, 32), np.uint8), np.zeros(8, np.float16)
    store(rows.ctypes.data, codes.ctypes.data, scales.ctypes.data, rows.size)
    quants = codes.astype(np.int32) - 128 if is_key else codes.view(np.int8).astype(np.int32)
    back = quants * scales.astype(np.float32)[:, None]
    largest = np.abs(rows).max(axis=1)
    error = np.abs(back - rows).max(axis=1)
    assert np.all(error <= np.where(largest >= 0.008, 0.0045 * largest, 4e-5))
    assert not back[0].any()
    np.testing.assert_array_equal(back, kv_round(rows, "q8_0"))
