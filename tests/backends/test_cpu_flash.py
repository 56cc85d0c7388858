"""Attention on tiles against NumPy, and against itself in other company."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_cpu_attention import filled_pool, kernel

from llamatrio.backends.cpu import flash, kv_rows, ops
from llamatrio.backends.cpu.flash_tiles import MOST_TILE_BYTES, transpose
from llamatrio.backends.cpu.levels import Level
from llamatrio.backends.cpu.reference import kv_round
from llamatrio.model.spec import KVType
from tests import emuamx

LEVELS = emuamx.levels()
each_level = pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)


def test_transpose_gives_the_columns() -> None:
    def emit(a: Any, x: Any, out: Any) -> None:
        from llamatrio.backends.cpu.vector import vi32

        source, target = a.pointer(x), a.pointer(out)
        for i, column in enumerate(transpose(a, [a.load(source, 64 * i, vi32) for i in range(16)])):
            a.store(column, target, 64 * i)

    matrix = np.arange(256, dtype=np.int32).reshape(16, 16)
    out = np.zeros_like(matrix)
    kernel("transpose_test", emit, 2, LEVELS[-1])(matrix.ctypes.data, out.ctypes.data)
    np.testing.assert_array_equal(out, matrix.T)


class Flash:
    """Attention of a span of rows for the query heads of one kv head."""

    def __init__(self, shape: kv_rows.AttentionShape, level: Level, cap: float = 0.0) -> None:
        d = shape.head_dim
        self.shape, self.cap = shape, cap
        self.begin = kernel(f"flash_begin_{shape.name}", flash.flash_begin(shape), 7, level)
        self.pack = kernel(f"flash_pack_{shape.name}", flash.flash_pack(shape), 7, level)
        self.chunk = kernel(f"flash_chunk_{shape.name}", flash.flash_chunk(shape), 11, level)
        self.finish = kernel(f"flash_finish_{d}", flash.flash_finish(d), 6, level)

    def __call__(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, cells: np.ndarray, position: int, head: int, window: int = 0
    ) -> np.ndarray:
        n_rows, n_heads, d = q.shape
        n_tiles = -(-n_rows // 16)
        queries, states = (
            np.zeros(n, np.uint8)
            for n in (n_heads * n_tiles * d // 32 * MOST_TILE_BYTES, n_heads * n_tiles * flash.tile_state_bytes(d))
        )
        packed, scratch = (np.zeros(n, np.uint8) for n in (flash.packed_bytes(d), flash.scores_bytes()))
        stride = 4 * n_heads * d
        self.begin(q.ctypes.data, stride, n_rows, n_heads, n_tiles, queries.ctypes.data, states.ctypes.data)
        seen_from = max(0, position + 1 - window) // kv_rows.CHUNK * kv_rows.CHUNK if window else 0
        for start in range(seen_from, position + n_rows, kv_rows.CHUNK):
            n = min(kv_rows.CHUNK, position + n_rows - start)
            self.pack(k.ctypes.data, v.ctypes.data, cells[start:].ctypes.data, n, head, packed.ctypes.data, 0)
            self.chunk(
                queries.ctypes.data, packed.ctypes.data, states.ctypes.data, scratch.ctypes.data, n_heads, n_tiles,
                position, start, n, window, ops.f32_bits(self.cap),
            )  # fmt: skip
        out = np.full((n_rows + 1, n_heads, d), 7, np.float32)
        self.finish(states.ctypes.data, out.ctypes.data, stride, n_rows, n_heads, n_tiles)
        assert np.all(out[-1] == 7), "wrote behind the last row"
        return out[:-1]


def expected(q: np.ndarray, k: np.ndarray, v: np.ndarray, position: int, window: int, cap: float) -> np.ndarray:
    rows = []
    for r, row in enumerate(q):
        last = position + r + 1
        first = max(0, last - window) if window else 0
        scores = row.astype(np.float64) @ k[first:last].T
        if cap:
            scores = cap * np.tanh(scores / cap)
        p = np.exp(scores - scores.max(axis=1, keepdims=True))
        rows.append((p / p.sum(axis=1, keepdims=True)) @ v[first:last])
    return np.array(rows)


CASES: list[tuple[int, int, int, KVType, KVType, float]] = [
    (64, 3, 3, "f16", "f16", 0.0),
    (32, 2, 2, "f16", "f16", 5.0),
    (128, 1, 2, "f16", "q8_0", 0.0),
    (96, 2, 1, "q8_0", "f16", 0.0),
    (256, 1, 4, "q8_0", "q8_0", 0.0),
]


@each_level
@pytest.mark.parametrize(("head_dim", "n_head_kv", "n_heads", "type_k", "type_v", "cap"), CASES)
def test_flash_over_scattered_cells(
    head_dim: int, n_head_kv: int, n_heads: int, type_k: KVType, type_v: KVType, cap: float, level: Level
) -> None:
    rng = np.random.default_rng(head_dim)
    attention = Flash(kv_rows.AttentionShape(head_dim, n_head_kv, n_heads, type_k, type_v, cap > 0), level, cap)
    k, v = rng.standard_normal((2, 500, n_head_kv, head_dim), np.float32)
    pools = filled_pool(k, type_k, level, is_key=True), filled_pool(v, type_v, level, is_key=False)
    cells, head = rng.permutation(500).astype(np.int32), n_head_kv - 1
    k_kept, v_kept = kv_round(k, type_k)[cells, head], kv_round(v, type_v)[cells, head]
    q = rng.standard_normal((100, n_heads, head_dim), np.float32) / np.float32(np.sqrt(head_dim))
    for position, n_rows, window in [(0, 64, 0), (0, 33, 0), (128, 64, 0), (320, 100, 0), (65, 47, 0), (300, 64, 40)]:
        out = attention(q[:n_rows], *pools, cells, position, head, window)
        exact = expected(q[:n_rows], k_kept, v_kept, position, window, cap)
        # bf16 queries, keys, weights and values: 8 bits each.
        largest, mean = (2e-2, 2e-3) if level.has_bf16 else (2e-4, 2e-5)
        np.testing.assert_allclose(out, exact, atol=largest)
        assert np.abs(out - exact).mean() < mean


@each_level
@pytest.mark.parametrize("window", [0, 40])
def test_a_rows_bits_do_not_depend_on_its_span(window: int, level: Level) -> None:
    rng = np.random.default_rng(0)
    attention = Flash(kv_rows.AttentionShape(64, 1, 2, "f16", "f16", False), level)
    k, v = rng.standard_normal((2, 400, 1, 64), np.float32)
    pools = filled_pool(k, "f16", level, is_key=True), filled_pool(v, "f16", level, is_key=False)
    cells = rng.permutation(400).astype(np.int32)
    q = rng.standard_normal((128, 2, 64), np.float32)
    whole = attention(q, *pools, cells, 200, 0, window)
    for first, last in [(0, 64), (64, 128), (5, 50), (127, 128)]:
        part = attention(q[first:last].copy(), *pools, cells, 200 + first, 0, window)
        np.testing.assert_array_equal(part, whole[first:last])
