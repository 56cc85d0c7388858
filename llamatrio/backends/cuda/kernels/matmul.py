"""Matrix products: `matmul_rows` and `matmul_float` for the few rows of a decode step, `matmul_tile` for prompts.

Which one runs is decided by what a row is, never by how many rows there are, so that a stream's numbers do not
depend on its neighbours: decode rows take matmul_rows (int8 activations) or matmul_float, prompt rows matmul_tile.
"""

from __future__ import annotations

from llamatrio.backends.cuda.kernels.experts import ExpertPlan
from llamatrio.backends.cuda.kernels.launcher import DevicePointer, Launcher, i32, require_multiple
from llamatrio.backends.cuda.kernels.rows import RowKind, Rows
from llamatrio.backends.cuda.kernels.weights import BLOCK, Matrix

COLUMNS = 8
"""Output columns of one block of matmul_rows: four warps, two columns each."""

TILE_COLUMNS = 128
"""Output columns of one block of matmul_tile."""


def rows_variant(n_rows: int) -> int:
    """-DROWS for n rows: the smallest of 1, 2, 4, 8, 16 that holds them; more rows take more blocks of 16."""
    return next((n for n in (1, 2, 4, 8) if n_rows <= n), 16)


def decode_kind(matrix: Matrix) -> RowKind:
    """The form in which decode rows are multiplied with the matrix."""
    return RowKind.F32 if matrix.type.is_float else RowKind.Q8


def matmul_rows(
    run: Launcher,
    matrix: Matrix,
    x: Rows,
    bias: DevicePointer,
    out: DevicePointer,
    *,
    n_rows: int,
    out_stride: int = 0,
) -> None:
    """out[r, :n_out] = x W^T (+ bias f32 [n_out] unless 0). x: of `decode_kind(matrix)`.

    out f32 rows, `out_stride` floats apart (0: n_out): Q, K and V of different types go side by side.
    """
    _few_rows(run, matrix, x, bias, 0, out, n_rows, rows_variant(n_rows), 1, out_stride or matrix.n_out)


def matmul_expert_rows(
    run: Launcher,
    matrix: Matrix,
    x: Rows,
    bias: DevicePointer,
    experts: DevicePointer,
    out: DevicePointer,
    *,
    n_pairs: int,
    share: int,
) -> None:
    """out f32 [n_pairs, n_out]: pair p multiplies x row p / share with matrix `experts[p]` (i32; negative: skipped).

    bias f32 [n_expert, n_out] or 0. share is the number of experts a row uses where x has one row for all of them
    (gate, up), and 1 where x has a row for each pair (down).
    """
    _few_rows(run, matrix, x, bias, experts, out, n_pairs, 1, share, matrix.n_out)


def _few_rows(
    run: Launcher,
    matrix: Matrix,
    x: Rows,
    bias: DevicePointer,
    experts: DevicePointer,
    out: DevicePointer,
    n_rows: int,
    variant: int,
    share: int,
    out_stride: int,
) -> None:
    if x.kind is not decode_kind(matrix):
        raise ValueError(f"expected rows as {decode_kind(matrix).name} for {matrix.type.name}, not {x.kind.name}")
    require_multiple("k", matrix.k, BLOCK)
    grid = (-(-matrix.n_out // COLUMNS), -(-n_rows // variant))
    sizes = (i32(matrix.n_out), i32(matrix.k), i32(n_rows))
    defines = {"TYPE": int(matrix.type), "ROWS": variant}
    tail = (bias, experts, out, *sizes)
    if matrix.type.is_float:
        run("matmul_float", grid, 128, matrix.planes, x.out, *tail, i32(share), i32(out_stride), **defines)
        return
    more = (i32(matrix.n_expert), i32(share), i32(out_stride))
    run("matmul_rows", grid, 128, matrix.planes, x.out, x.extra, *tail, *more, **defines)


def tile_rows(n_rows: int) -> int:
    """-DROWS of matmul_tile for n rows (or, with experts, for the rows that an expert gets on average)."""
    return next((n for n in (16, 64) if n_rows <= n), 128)


def matmul_tile(
    run: Launcher,
    matrix: Matrix,
    x: Rows,
    bias: DevicePointer,
    out: DevicePointer,
    *,
    n_rows: int,
    out_stride: int = 0,
) -> None:
    """out[r, :n_out] = x W^T (+ bias f32 [n_out] unless 0). x: RowKind.F16. out as in matmul_rows."""
    rows = tile_rows(n_rows)
    n_tiles, stride = -(-n_rows // rows), out_stride or matrix.n_out
    _tiles(run, matrix, x, bias, (0, 0), out, n_rows, rows, n_tiles, 1, stride)


def matmul_expert_tile(
    run: Launcher,
    matrix: Matrix,
    x: Rows,
    bias: DevicePointer,
    plan: ExpertPlan,
    out: DevicePointer,
    *,
    n_pairs: int,
    share: int,
) -> None:
    """As matmul_expert_rows, for the rows of prompts: pairs in the plan's tiles. x: RowKind.F16."""
    pointers = (plan.tiles, plan.order)
    rows, stride = plan.tile_rows, matrix.n_out
    _tiles(run, matrix, x, bias, pointers, out, n_pairs, rows, plan.n_tiles, share, stride)


def _tiles(
    run: Launcher,
    matrix: Matrix,
    x: Rows,
    bias: DevicePointer,
    tiles: tuple[DevicePointer, DevicePointer],
    out: DevicePointer,
    n_rows: int,
    rows: int,
    n_tiles: int,
    share: int,
    out_stride: int,
) -> None:
    if x.kind is not RowKind.F16:
        raise ValueError(f"expected rows as F16, not {x.kind.name}")
    require_multiple("k", matrix.k, BLOCK)
    grid = (-(-matrix.n_out // TILE_COLUMNS), n_tiles)
    pointers = (matrix.planes, x.out, x.extra, bias, *tiles, out)
    sizes = (i32(matrix.n_out), i32(matrix.k), i32(n_rows), i32(matrix.n_expert), i32(share), i32(out_stride))
    run("matmul_tile", grid, 128, *pointers, *sizes, TYPE=matrix.type, ROWS=rows)
