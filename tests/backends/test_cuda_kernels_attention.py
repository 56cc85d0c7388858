"""Attention over scattered cells against float64: windows, soft caps, sinks, splits, ragged batches, both KV types.

Factors are rounded to f16 (11 bits) before they meet, so results agree to 2e-3 of the largest value.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import cuda_reference as ref
import numpy as np
import pytest
from cuda_rig import Rig

pytest.importorskip("cuda.core")

from llamatrio.backends.cuda.kernels import attention as k
from llamatrio.backends.cuda.kernels.rows import HeadShape
from llamatrio.sched.types import Run

N_CTX = 420


class Sequences(NamedTuple):
    """Lanes with scattered cells of one pool, and what their K and V rows mean."""

    cached: k.Cached
    keys: np.ndarray
    values: np.ndarray
    table: np.ndarray


def stored(rig: Rig, x: np.ndarray, heads: HeadShape, q8: bool) -> tuple[int, np.ndarray]:
    """KV rows on the device and the values they stand for."""
    if not q8:
        half = x.astype(np.float16)
        return rig.put(half), half.astype(np.float64)
    rows = ref.q8_row(x, heads.kv_row_bytes(q8=True))
    return rig.put(rows), ref.q8_row_values(rows, x.shape[1])


def sequences(rig: Rig, heads: HeadShape, lengths: list[int]) -> Sequences:
    """Interleaved lanes; cells that no lane owns hold NaN where the type can."""
    rng = np.random.default_rng(11)
    n_cells, shape = sum(lengths) + 5, (heads.n_head_kv, heads.head_dim)
    order = rng.permutation(n_cells).astype(np.int32)
    table = np.full((len(lengths), N_CTX), np.iinfo(np.int32).max // 2, np.int32)
    at = 0
    for lane, n in enumerate(lengths):
        table[lane, :n] = order[at : at + n]
        at += n
    k_in, v_in = rng.standard_normal((2, n_cells, shape[0] * shape[1])).astype(np.float32)
    for x, q8 in ((k_in, heads.k_q8), (v_in, heads.v_q8)):
        if not q8:
            x[order[at:]] = np.nan
    k_rows, keys = stored(rig, k_in, heads, heads.k_q8)
    v_rows, values = stored(rig, v_in, heads, heads.v_q8)
    cached = k.Cached(k_rows, v_rows, rig.put(table), N_CTX)
    return Sequences(cached, keys.reshape(-1, *shape), values.reshape(-1, *shape), table)


def expected_row(
    s: Sequences, q: np.ndarray, lane: int, position: int, rule: k.Rule, sinks: np.ndarray | None
) -> np.ndarray:
    first = max(0, position - rule.window + 1) if rule.window else 0
    cells = s.table[lane, first : position + 1]
    return ref.attention(q, s.keys[cells], s.values[cells], scale=rule.scale, softcap=rule.softcap, sinks=sinks)


def check_decode(
    rig: Rig, heads: HeadShape, lengths: list[int], rule: k.Rule, *, n_splits: int, with_sinks: bool = False
) -> None:
    """One row for each lane at its last position, and a row of padding in between."""
    s, rng = sequences(rig, heads, lengths), np.random.default_rng(3)
    lanes = np.insert(np.arange(len(lengths)), 1, 0).astype(np.int32)
    positions = np.insert(np.array(lengths) - 1, 1, -1).astype(np.int32)
    n, width = len(lanes), heads.n_head * heads.head_dim
    q = rng.standard_normal((n, width + 8)).astype(np.float32)
    sinks = rng.standard_normal(heads.n_head).astype(np.float32) if with_sinks else None
    rule = rule._replace(sinks=rig.put(sinks) if sinks is not None else 0)
    out, partial = rig.empty(n * width * 4), rig.empty(k.partial_bytes(heads, n, n_splits))
    k.attention_decode(
        rig.run, rig.put(q), s.cached, rig.put(lanes), rig.put(positions), out, partial,
        n_rows=n, q_stride=width + 8, heads=heads, rule=rule, n_splits=n_splits,
    )  # fmt: skip
    found = rig.get(out, (n, heads.n_head, heads.head_dim), np.float32)
    for r in range(n):
        if positions[r] < 0:
            assert not found[r].any()
            continue
        row = q[r, :width].reshape(heads.n_head, heads.head_dim)
        expected = expected_row(s, row, lanes[r], positions[r], rule, sinks)
        assert np.abs(found[r] - expected).max() < 2e-3 * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize(("k_q8", "v_q8"), [(False, False), (True, True), (True, False), (False, True)])
def test_decode_ragged_rows(cuda_rig: Rig, k_q8: bool, v_q8: bool) -> None:
    heads = HeadShape(4, 2, 64, k_q8, v_q8)
    check_decode(cuda_rig, heads, [1, 2, 17, 64, 65, 130], k.Rule(64**-0.5), n_splits=4)


@pytest.mark.parametrize("head_dim", [32, 96, 128, 256])
def test_decode_head_sizes(cuda_rig: Rig, head_dim: int) -> None:
    heads = HeadShape(3, 1, head_dim, True, False)
    check_decode(cuda_rig, heads, [1, 40], k.Rule(head_dim**-0.5), n_splits=1)


@pytest.mark.parametrize("n_splits", [1, 2, 4])
def test_decode_splits_long_rows(cuda_rig: Rig, n_splits: int) -> None:
    """128, 129, 256, 257 and 400 cells: one, two, four parts, and parts of several hundred cells."""
    heads = HeadShape(2, 1, 32, False, False)
    check_decode(cuda_rig, heads, [128, 129, 256, 257, 400], k.Rule(0.3), n_splits=n_splits, with_sinks=True)


@pytest.mark.parametrize("window", [1, 16, 33, 200])
def test_decode_window(cuda_rig: Rig, window: int) -> None:
    heads = HeadShape(2, 1, 32, True, True)
    check_decode(cuda_rig, heads, [1, 16, 34, 250], k.Rule(0.2, window=window), n_splits=2)


@pytest.mark.parametrize("n_head", [1, 7, 16])
def test_decode_groups_softcap_sinks(cuda_rig: Rig, n_head: int) -> None:
    """One head, an odd group, and a group of more than eight, with soft cap and sinks."""
    heads = HeadShape(n_head, 1, 64, False, False)
    check_decode(cuda_rig, heads, [5, 70], k.Rule(0.5, softcap=3.0), n_splits=1, with_sinks=True)


def check_prefill(
    rig: Rig, heads: HeadShape, pieces: list[tuple[int, int]], rule: k.Rule, *, with_sinks: bool = False
) -> None:
    """Lane i holds pos0 + n cells and is asked for its last n rows; a padding tile ends the launch."""
    s, rng = sequences(rig, heads, [pos0 + n for pos0, n in pieces]), np.random.default_rng(4)
    runs, n_rows = [], 0
    for lane, (pos0, n) in enumerate(pieces):
        runs.append(Run(lane=lane, row=n_rows, n_rows=n, pos0=pos0, is_decode=False))
        n_rows += n
    tiles = np.concatenate([k.prefill_tiles(runs, heads), np.zeros((1, 4), np.int32)])
    width = heads.n_head * heads.head_dim
    q = rng.standard_normal((n_rows, width + 4)).astype(np.float32)
    sinks = rng.standard_normal(heads.n_head).astype(np.float32) if with_sinks else None
    rule = rule._replace(sinks=rig.put(sinks) if sinks is not None else 0)
    out = rig.empty(n_rows * width * 4)
    k.attention_prefill(
        rig.run, rig.put(q), s.cached, rig.put(tiles), out,
        n_tiles=len(tiles), q_stride=width + 4, heads=heads, rule=rule,
    )  # fmt: skip
    found = rig.get(out, (n_rows, heads.n_head, heads.head_dim), np.float32)
    for run in runs:
        for i in range(run.n_rows):
            row = q[run.row + i, :width].reshape(heads.n_head, heads.head_dim)
            expected = expected_row(s, row, run.lane, run.pos0 + i, rule, sinks)
            assert np.abs(found[run.row + i] - expected).max() < 2e-3 * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize(("k_q8", "v_q8"), [(False, False), (True, True), (True, False), (False, True)])
def test_prefill_ragged_batches(cuda_rig: Rig, k_q8: bool, v_q8: bool) -> None:
    """From the start, in the middle, one row, and a piece that ends on a border of the 64 cells."""
    heads = HeadShape(4, 2, 64, k_q8, v_q8)
    check_prefill(cuda_rig, heads, [(0, 37), (61, 3), (63, 1), (100, 28)], k.Rule(64**-0.5))


@pytest.mark.parametrize("head_dim", [32, 96, 128, 256])
def test_prefill_head_sizes(cuda_rig: Rig, head_dim: int) -> None:
    check_prefill(cuda_rig, HeadShape(2, 1, head_dim, False, True), [(0, 5), (30, 9)], k.Rule(head_dim**-0.5))


@pytest.mark.parametrize("window", [1, 20, 64, 100])
def test_prefill_window(cuda_rig: Rig, window: int) -> None:
    """Rows of one tile begin at different cells, and some see nothing of the first cells loaded."""
    check_prefill(cuda_rig, HeadShape(2, 2, 32, True, True), [(0, 70), (150, 66)], k.Rule(0.2, window=window))


@pytest.mark.parametrize("n_head", [1, 7, 16])
def test_prefill_groups_softcap_sinks(cuda_rig: Rig, n_head: int) -> None:
    rule = k.Rule(0.5, softcap=3.0)
    check_prefill(cuda_rig, HeadShape(n_head, 1, 64, False, False), [(3, 11)], rule, with_sinks=True)


def test_attention_on_turing(turing_rig: Rig) -> None:
    heads = HeadShape(4, 2, 64, False, True)
    check_prefill(turing_rig, heads, [(0, 37), (61, 3)], k.Rule(64**-0.5, window=40))
    check_decode(turing_rig, heads, [1, 40], k.Rule(64**-0.5), n_splits=1)


def test_prefill_row_is_the_same_in_any_tile(cuda_rig: Rig) -> None:
    """Bit for bit: a prompt at once, and cut into pieces as a busy scheduler cuts it."""
    heads, n = HeadShape(2, 1, 32, False, False), 150
    s = sequences(cuda_rig, heads, [n])
    q = np.random.default_rng(6).standard_normal((n, 64)).astype(np.float32)
    results = []
    for cuts in ([0, n], [0, 1, 50, 64, 113, n]):
        runs = [Run(0, a, b - a, a, is_decode=False) for a, b in pairwise(cuts)]
        tiles, out = k.prefill_tiles(runs, heads), cuda_rig.empty(q.nbytes)
        k.attention_prefill(
            cuda_rig.run, cuda_rig.put(q), s.cached, cuda_rig.put(tiles), out,
            n_tiles=len(tiles), q_stride=64, heads=heads, rule=k.Rule(0.2, window=90),
        )  # fmt: skip
        results.append(cuda_rig.get(out, q.shape, np.float32))
    assert np.array_equal(*results)


def test_prefill_tiles_cover_every_row_once() -> None:
    runs = [Run(2, 0, 25, 7, is_decode=False), Run(0, 25, 3, 0, is_decode=False)]
    tiles = k.prefill_tiles(runs, HeadShape(14, 2, 64, False, False))
    assert tiles.tolist() == [[0, 9, 2, 7], [9, 9, 2, 16], [18, 7, 2, 25], [25, 3, 0, 0]]
