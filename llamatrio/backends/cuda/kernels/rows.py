"""Launchers of the kernels that work row by row: conversions, norms, gated activations, rope with the KV store.

A row operation leaves its rows in one of three forms (`RowKind`), which the next matrix product reads:
F32 (`out` [rows, k] f32), Q8 (`out` [rows, k] int8, `extra` [rows, k / 32] of 8 bytes), F16 (`out` [rows, k] f16,
`extra` [rows] f32).
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamatrio.backends.cuda.kernels.launcher import (
    WARP,
    DevicePointer,
    Launcher,
    f32,
    i32,
    require_multiple,
    whole_warps,
)

HEAD_WARPS = 4
"""Heads of one block of rope_store."""


class RowKind(IntEnum):
    """The form of emitted rows; the values are the kernels' -DOUT."""

    F32 = 0
    Q8 = 1
    F16 = 2


class Activation(IntEnum):
    """The gate's function; the values are the kernel's -DACT."""

    SILU = 0
    GELU = 1
    SWIGLU_OAI = 2


class Rows(NamedTuple):
    """Where emitted rows go."""

    kind: RowKind
    out: DevicePointer
    extra: DevicePointer = 0


def row_bytes(kind: RowKind, k: int) -> tuple[int, int]:
    """Bytes of one emitted row in `out` and in `extra`."""
    return {RowKind.F32: (4 * k, 0), RowKind.Q8: (k, k // 32 * 8), RowKind.F16: (2 * k, 4)}[kind]


def convert_rows(run: Launcher, x: DevicePointer, to: Rows, *, n_rows: int, k: int) -> None:
    """f32 rows into another form. k a multiple of 32."""
    require_multiple("k", k, WARP)
    run("convert_rows", (n_rows,), whole_warps(k // 4, 256), x, i32(k), to.out, to.extra, OUT=to.kind)


def rms_norm(
    run: Launcher,
    x: DevicePointer,
    delta: DevicePointer,
    weight: DevicePointer,
    to: Rows,
    *,
    n_rows: int,
    k: int,
    eps: float,
) -> None:
    """x += delta (unless delta is 0), then the norm of x times weight into `to`. Rows f32 [n_rows, k]."""
    require_multiple("k", k, WARP)
    threads = whole_warps(k // 4, 512)
    run("rms_norm", (n_rows,), threads, x, delta, weight, f32(eps), i32(k), to.out, to.extra, OUT=to.kind)


def post_norm(
    run: Launcher,
    x: DevicePointer,
    delta: DevicePointer,
    weight: DevicePointer,
    *,
    n_rows: int,
    k: int,
    eps: float,
) -> None:
    """x += norm(delta) * weight. Rows f32 [n_rows, k]."""
    require_multiple("k", k, 4)
    run("post_norm", (n_rows,), whole_warps(k // 4, 512), x, delta, weight, f32(eps), i32(k))


def add_rows(run: Launcher, x: DevicePointer, delta: DevicePointer, *, n: int) -> None:
    """x += delta over n f32, n a multiple of 4."""
    require_multiple("n", n, 4)
    run("add_rows", (-(-n // 4 // 256),), 256, x, delta, i32(n))


def take_rows(run: Launcher, x: DevicePointer, rows: DevicePointer, out: DevicePointer, *, n: int, k: int) -> None:
    """out[i] = x[rows[i]] (i32 [n]; negative: zeros). f32 rows of k, a multiple of 4."""
    require_multiple("k", k, 4)
    threads = whole_warps(k // 4, 256)
    run("take_rows", (n, -(-k // 4 // threads)), threads, x, rows, out, i32(k))


def glu(
    run: Launcher,
    gate: DevicePointer,
    up: DevicePointer,
    to: Rows,
    *,
    n_rows: int,
    k: int,
    stride: int,
    activation: Activation,
) -> None:
    """act(gate) * up into `to`; both f32 rows of k, `stride` floats apart."""
    require_multiple("k", k, WARP)
    require_multiple("stride", stride, 4)
    run(
        "glu",
        (n_rows,),
        whole_warps(k // 4, 256),
        gate,
        up,
        i32(stride),
        i32(k),
        to.out,
        to.extra,
        OUT=to.kind,
        ACT=activation,
    )


class HeadShape(NamedTuple):
    """What rope_store and attention know of a layer's heads."""

    n_head: int
    n_head_kv: int
    head_dim: int
    """A multiple of 32, at most 256."""
    k_q8: bool
    v_q8: bool

    def kv_row_bytes(self, *, q8: bool) -> int:
        """Bytes of one cell's K or V row in one layer: f16, or int8 quants then f16 scales, padded to 16."""
        n = self.n_head_kv * self.head_dim
        return -(-(n + n // 32 * 2) // 16) * 16 if q8 else 2 * n

    @property
    def k_row_bytes(self) -> int:
        """Bytes of a K row."""
        return self.kv_row_bytes(q8=self.k_q8)

    @property
    def v_row_bytes(self) -> int:
        """Bytes of a V row."""
        return self.kv_row_bytes(q8=self.v_q8)


def rope_turns(frequencies: NDArray[np.float64]) -> NDArray[np.float32]:
    """The table that rope_store reads, from `model.rope.rope_frequencies`: turns of each pair per position, float32
    [n_dims / 2, 2], as a high and a low part."""
    turns = frequencies / (2 * np.pi)
    high = turns.astype(np.float32)
    return np.stack([high, (turns - high).astype(np.float32)], -1)


def rope_store(
    run: Launcher,
    qkv: DevicePointer,
    q_norm: DevicePointer,
    k_norm: DevicePointer,
    positions: DevicePointer,
    cells: DevicePointer,
    turns: DevicePointer,
    k_rows: DevicePointer,
    v_rows: DevicePointer,
    *,
    n_rows: int,
    stride: int,
    heads: HeadShape,
    n_dims: int,
    neox: bool,
    eps: float,
    magnitude: float,
) -> None:
    """Norm (unless 0) and rope of Q (in place) and K, and K and V into `cells` of one layer.

    qkv f32 [n_rows, stride]: Q, K, V heads side by side. positions, cells i32 [n_rows]; a negative cell marks a row
    of padding, which is left alone. turns: see rope_turns. magnitude: RopeSpec.attn_factor. k_rows, v_rows: PoolShape's
    addresses.
    """
    require_multiple("head_dim", heads.head_dim, WARP)
    n_heads = heads.n_head + 2 * heads.n_head_kv
    run(
        "rope_store",
        (n_rows, -(-n_heads // HEAD_WARPS)),
        HEAD_WARPS * WARP,
        qkv,
        q_norm,
        k_norm,
        positions,
        cells,
        turns,
        k_rows,
        v_rows,
        i32(stride),
        i32(heads.n_head),
        i32(heads.n_head_kv),
        i32(n_dims),
        i32(heads.k_row_bytes),
        i32(heads.v_row_bytes),
        f32(eps),
        f32(magnitude),
        D=heads.head_dim,
        NEOX=int(neox),
        K_Q8=int(heads.k_q8),
        V_Q8=int(heads.v_q8),
    )
