"""Attention over scattered cells: `attention_decode` with `attention_combine`, and `attention_prefill`.

Decode rows take the first, prompt rows the second, whatever their number (see `matmul`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from llamatrio.backends.cuda.kernels.launcher import (
    WARP,
    DevicePointer,
    Launcher,
    f32,
    i32,
    require_multiple,
)
from llamatrio.backends.cuda.kernels.rows import HeadShape
from llamatrio.sched.types import Int32Array, Run

HEADS = 8
"""Query heads of one KV head that a decode block takes."""

TILE = 64
"""Fragment rows of a prefill block: rows of the prompt times query heads of a group."""


class Rule(NamedTuple):
    """How a layer attends."""

    scale: float
    softcap: float = 0.0
    """0: none."""
    window: int = 0
    """0: none; else a row sees the positions p - window < q <= p."""
    sinks: DevicePointer = 0
    """f32 [n_head] logits that take weight and give no value; 0: none."""


class Cached(NamedTuple):
    """A layer's K and V, and where sequences keep their cells."""

    k_rows: DevicePointer
    v_rows: DevicePointer
    cell_table: DevicePointer
    """i32 [n_lanes, table_stride]: entry i of a lane is the cell of its position i."""
    table_stride: int


def partial_bytes(heads: HeadShape, n_rows: int, n_splits: int) -> int:
    """Bytes of attention_decode's scratch."""
    return 4 * n_rows * heads.n_head * n_splits * (heads.head_dim + 2)


def attention_decode(
    run: Launcher,
    q: DevicePointer,
    cached: Cached,
    lanes: DevicePointer,
    positions: DevicePointer,
    out: DevicePointer,
    partial: DevicePointer,
    *,
    n_rows: int,
    q_stride: int,
    heads: HeadShape,
    rule: Rule,
    n_splits: int,
) -> None:
    """out f32 [n_rows, n_head * head_dim]: each row attends to its lane's cells up to its own position.

    q f32 [n_rows, q_stride] (a multiple of 4). lanes, positions i32 [n_rows]; a negative position is padding: zeros.
    A row's cells are cut into at most n_splits parts of 128 or more; take ceil(longest / 128), at most about 64.
    Numbers depend on n_splits only where a row sees more than 128 * n_splits cells: keep it fixed for a model.
    """
    require_multiple("head_dim", heads.head_dim, WARP)
    require_multiple("q_stride", q_stride, 4)
    group = heads.n_head // heads.n_head_kv
    run(
        "attention_decode",
        (n_rows, heads.n_head_kv * -(-group // HEADS), n_splits),
        128,
        q,
        cached.k_rows,
        cached.v_rows,
        cached.cell_table,
        lanes,
        positions,
        rule.sinks,
        out,
        partial,
        i32(q_stride),
        i32(cached.table_stride),
        i32(heads.n_head),
        i32(heads.n_head_kv),
        i32(heads.k_row_bytes),
        i32(heads.v_row_bytes),
        i32(rule.window),
        f32(rule.scale),
        f32(rule.softcap),
        D=heads.head_dim,
        K_Q8=int(heads.k_q8),
        V_Q8=int(heads.v_q8),
    )
    if n_splits > 1:
        grid, sizes = (n_rows, heads.n_head), (i32(n_splits), i32(rule.window))
        pointers = (partial, positions, rule.sinks, out)
        run("attention_combine", grid, heads.head_dim, *pointers, *sizes, D=heads.head_dim)


def prefill_tiles(runs: Iterable[Run], heads: HeadShape) -> Int32Array:
    """int32 [n_tiles, 4], attention_prefill's work: (first row, n_rows, lane, first position) of pieces of runs."""
    step = TILE // (heads.n_head // heads.n_head_kv)
    tiles = [
        (run.row + at, min(step, run.n_rows - at), run.lane, run.pos0 + at)
        for run in runs
        for at in range(0, run.n_rows, step)
    ]
    return np.array(tiles, np.int32).reshape(-1, 4)


def attention_prefill(
    run: Launcher,
    q: DevicePointer,
    cached: Cached,
    tiles: DevicePointer,
    out: DevicePointer,
    *,
    n_tiles: int,
    q_stride: int,
    heads: HeadShape,
    rule: Rule,
) -> None:
    """out f32 [n_rows, n_head * head_dim] for the rows in `tiles` (int32 [n_tiles, 4], see prefill_tiles).

    q f32 [n_rows, q_stride] (a multiple of 4). Every row's own cell is stored already. At most 64 heads to a group.
    """
    require_multiple("head_dim", heads.head_dim, WARP)
    require_multiple("q_stride", q_stride, 4)
    run(
        "attention_prefill",
        (n_tiles, heads.n_head_kv),
        128,
        q,
        cached.k_rows,
        cached.v_rows,
        cached.cell_table,
        tiles,
        rule.sinks,
        out,
        i32(q_stride),
        i32(cached.table_stride),
        i32(heads.n_head),
        i32(heads.n_head_kv),
        i32(heads.k_row_bytes),
        i32(heads.v_row_bytes),
        i32(rule.window),
        f32(rule.scale),
        f32(rule.softcap),
        D=heads.head_dim,
        K_Q8=int(heads.k_q8),
        V_Q8=int(heads.v_q8),
    )
