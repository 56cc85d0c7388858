"""The panel kernels: many rows at once, on AMX tiles.

A panel is 32 columns of the output (two groups). Loops, from the outside: 16 panels; a chunk of about 512 k, whose
weights are dequantized to bf16 in pairs of k, as the tiles want them; 32 rows; the panels. So the 32 rows of x (at
most 40 KB) stay in the first-level cache while the weights (at most 640 KB) stream past them from the second. An
output of 32 x 32 is four tiles that stay in registers over the chunk; from chunk to chunk they are kept in `out` as
f32, which loses nothing. Every row is summed in the same order, wherever it stands and however many there are.

The rows of `out` should be an odd number of 64-byte lines apart (linear.row_stride): at even ones, above all powers of
two, the 32 rows of a tile fall into few sets of the cache, and storing them was seen to take a third longer.

An f16 weight has more digits than a bf16, and rounding it costs more than f16 models may lose: it becomes the sum of
two bf16, which is exact, and takes two products.

At the edges (fewer than 32 rows left, or one group) the tiles go through 4 KB of scratch instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from llamatrio.backends.cpu.compile import Emit
from llamatrio.backends.cpu.formats import ROWS, Format
from llamatrio.backends.cpu.formats_float import FloatFormat
from llamatrio.backends.cpu.rows import for_each_tile
from llamatrio.backends.cpu.vector import Asm, Value, vf32, vi32
from llamatrio.model.ggml_type import GGMLType

CHUNK = 512
"""Values of k that are dequantized at a time; a multiple of every type's block."""
LONGEST_CHUNK = 640
"""The last chunk takes what is left, up to this."""
PANELS = 16
TILE = 1024
"""Bytes of an AMX tile: 16 rows of 64."""
_EDGE_STRIDE = 128
_EDGE_BYTES = 32 * _EDGE_STRIDE


def scratch_bytes(k: int) -> int:
    """Bytes of scratch that a panel kernel needs for rows of `k` weights."""
    return PANELS * 2 * ROWS * min(k, LONGEST_CHUNK) * 2 + _EDGE_BYTES


class _Product(NamedTuple):
    """The arguments of the kernel, and where they have got to."""

    x: Value
    """The chunk's first tile of row 0."""
    x_stride: Value
    """Bytes from 16 rows of x to the next."""
    out: Value
    ld_out: Value
    edge: Value
    m: Value
    n_steps: Value
    """Steps of 32 k in the chunk."""
    is_first: Value
    """The chunk starts the sum."""
    n_parts: int
    """Tiles of bf16 that stand for 32 k of a group."""


def panel_kernel(made: Format | FloatFormat) -> Emit:
    """The panel kernel of a type."""

    def emit(
        asm: Asm,
        w: Value,
        x: Value,
        out: Value,
        scratch: Value,
        m: Value,
        k: Value,
        ld_out: Value,
        g0: Value,
        g1: Value,
    ) -> None:
        weights, source, target, edge = (asm.pointer(a) for a in (w, x, out, scratch))
        room = asm.at(edge, _EDGE_BYTES)
        n_parts = 2 if made.type == GGMLType.F16 else 1
        n_groups = 2 * PANELS // n_parts
        group_stride = made.row_bytes(asm, k)
        asm.tile_config()

        def panels(first: Value, _: list[Value]) -> list[Value]:
            last = asm.minimum(g1, asm.add(first, n_groups))

            def chunk(at: Value, _: list[Value]) -> list[Value]:
                left = asm.builder.sub(k, at)
                is_last = asm.less(left, LONGEST_CHUNK + 1)
                length = asm.select(is_last, left, asm.int64(CHUNK))
                group_bytes = asm.mul(length, 2 * ROWS * n_parts)

                def dequantize(g: Value, _: list[Value]) -> list[Value]:
                    start = asm.at(weights, asm.add(asm.mul(g, group_stride), made.row_bytes(asm, at)))
                    place = asm.at(room, asm.mul(asm.builder.sub(g, first), group_bytes))
                    _dequantize(asm, made, start, place, length, group_stride)
                    return []

                asm.loop(first, last, [], dequantize)
                steps = asm.div(length, 32)
                product = _Product(
                    x=asm.at(source, asm.mul(asm.div(at, 32), TILE)),
                    x_stride=asm.mul(asm.div(k, 32), TILE),
                    out=asm.at(target, asm.mul(first, 4 * ROWS)),
                    ld_out=ld_out,
                    edge=edge,
                    m=m,
                    n_steps=steps,
                    is_first=asm.equal(at, 0),
                    n_parts=n_parts,
                )
                _multiply(asm, product, room, asm.builder.sub(last, first))
                return []

            # Ends where the last chunk has taken more than CHUNK.
            asm.loop(0, asm.maximum(asm.add(k, CHUNK - LONGEST_CHUNK), asm.int64(1)), [], chunk, step=CHUNK)
            return []

        asm.loop(g0, g1, [], panels, step=n_groups)
        asm.tile_release()

    return emit


# ---- weights to bf16


def _dequantize(asm: Asm, made: Format | FloatFormat, weights: Value, room: Value, k: Value, to_next: Value) -> None:
    """k weights of one group to bf16 [k / 2][16][2] at `room`; f16 to [k / 32][2][16][16][2], of which the second
    dimension is added up. `to_next` bytes on are the weights that are wanted next."""
    if isinstance(made, Format):
        _dequantize_codes(asm, made, weights, room, k, to_next)
    elif made.type == GGMLType.F16:
        _convert_floats(asm, made, weights, room, k, to_next, _split_pair)
    else:
        _convert_floats(asm, made, weights, room, k, to_next, lambda asm, even, odd: [asm.bf16_pairs(even, odd)])


def _convert_floats(
    asm: Asm,
    made: FloatFormat,
    weights: Value,
    room: Value,
    k: Value,
    to_next: Value,
    parts_of: Callable[[Asm, Value, Value], list[Value]],
) -> None:
    def tile(i: Value, _: list[Value]) -> list[Value]:
        offset = asm.mul(i, made.tile_bytes)
        asm.prefetch_lines(weights, asm.add(offset, to_next), made.tile_bytes)
        for pair in range(16):
            parts = parts_of(asm, *made.load_pair(asm, weights, offset, pair))
            for n, part in enumerate(parts):
                at = asm.add(asm.mul(i, TILE * len(parts)), TILE * n + 64 * pair)
                asm.store(part, room, at, align=64)
        return []

    asm.loop(0, asm.div(k, 32), [], tile)


def _split_pair(asm: Asm, even: Value, odd: Value) -> list[Value]:
    """A pair as two pairs of bf16 with the same sum: the upper digits, and what they leave (at most 3 bits)."""
    upper_bits = asm.splat_int(0xFFFF0000)
    upper = [asm.bitcast(asm.builder.and_(asm.bitcast(v, vi32), upper_bits), vf32) for v in (even, odd)]
    return [asm.bf16_pairs(*upper), asm.bf16_pairs(asm.fsub(even, upper[0]), asm.fsub(odd, upper[1]))]


def _dequantize_codes(asm: Asm, made: Format, weights: Value, room: Value, k: Value, to_next: Value) -> None:
    def step(offset: Value, index: Value, head: list[Value], carried: list[Value]) -> list[Value]:
        asm.prefetch_lines(weights, asm.add(offset, to_next), made.tile_bytes)
        codes, scales, minima = made.unpack(asm, weights, offset, head)
        for v, quad in enumerate(codes):
            half = v * len(scales) // 8
            values = [asm.fma(scales[half], code, minima[half]) for code in asm.bytes_to_f32(quad)]
            at = asm.add(asm.mul(index, TILE), 128 * v)
            asm.store(asm.bf16_pairs(values[0], values[1]), room, at, align=64)
            asm.store(asm.bf16_pairs(values[2], values[3]), room, asm.add(at, 64), align=64)
        return []

    for_each_tile(asm, made, weights, k, [], step)


# ---- the product


def _multiply(asm: Asm, p: _Product, room: Value, n_groups: Value) -> None:
    """out[m][16 n_groups] (+)= the chunk of x times the groups dequantized in `room`."""
    group_bytes = asm.mul(p.n_steps, TILE * p.n_parts)
    n_whole = asm.builder.and_(n_groups, asm.int64(-2))

    def rows(row: Value, _: list[Value]) -> list[Value]:
        n_rows = asm.minimum(asm.builder.sub(p.m, row), asm.int64(32))
        x = asm.at(p.x, asm.mul(asm.div(row, 16), p.x_stride))
        out = asm.at(p.out, asm.mul(row, p.ld_out))
        is_whole = asm.equal(n_rows, 32)

        def panel(g: Value, _: list[Value]) -> list[Value]:
            weights, columns = asm.at(room, asm.mul(g, group_bytes)), asm.at(out, asm.mul(g, 4 * ROWS))
            for half in (2, 3):  # of the next 32 rows, a tile for each panel done here
                asm.prefetch_lines(x, asm.add(asm.mul(p.x_stride, half), asm.mul(asm.div(g, 2), TILE)), TILE)
            with asm.choose(is_whole) as (whole, edge):
                with whole:
                    _tiles(asm, p, x, weights, group_bytes, columns, p.ld_out)
                with edge:
                    _edge(asm, p, x, weights, group_bytes, columns, n_rows, n_vectors=2)
            return []

        asm.loop(0, n_whole, [], panel, step=2)
        with asm.when(asm.less(n_whole, n_groups)):  # the second group's columns are computed from the first's weights
            weights, columns = asm.at(room, asm.mul(n_whole, group_bytes)), asm.at(out, asm.mul(n_whole, 4 * ROWS))
            _edge(asm, p, x, weights, asm.int64(0), columns, n_rows, n_vectors=1)
        return []

    asm.loop(0, p.m, [], rows, step=32)


def _edge(
    asm: Asm,
    p: _Product,
    x: Value,
    weights: Value,
    group_bytes: Value,
    out: Value,
    n_rows: Value,
    n_vectors: int,
) -> None:
    """As _tiles, but only n_rows rows and 16 n_vectors columns of the output are read and written."""

    def copy(source: Value, source_stride: Value, target: Value, target_stride: Value) -> None:
        def row(r: Value, _: list[Value]) -> list[Value]:
            for at in range(0, 64 * n_vectors, 64):
                value = asm.load(source, asm.add(asm.mul(r, source_stride), at), vf32)
                asm.store(value, target, asm.add(asm.mul(r, target_stride), at))
            return []

        asm.loop(0, n_rows, [], row)

    stride = asm.int64(_EDGE_STRIDE)
    copy(out, p.ld_out, p.edge, stride)
    _tiles(asm, p, x, weights, group_bytes, p.edge, stride)
    copy(p.edge, stride, out, p.ld_out)


def _tiles(asm: Asm, p: _Product, x: Value, weights: Value, group_bytes: Value, out: Value, ld_out: Value) -> None:
    """out[32][32] (+)= 32 rows of x times two groups. Tiles: 0 1 / 2 3 the output, 4 / 5 x, 6 7 the weights."""
    below, beside = asm.at(x, p.x_stride), asm.at(weights, group_bytes)
    lower = asm.at(out, asm.mul(ld_out, 16))
    corners = (out, asm.at(out, 64), lower, asm.at(lower, 64))
    with asm.choose(p.is_first) as (first, later):
        with first:
            for tile in range(4):
                asm.tile_zero(tile)
        with later:
            for tile, corner in enumerate(corners):
                asm.tile_load(tile, corner, ld_out)

    def step(i: Value, _: list[Value]) -> list[Value]:
        at = asm.mul(i, TILE)
        asm.tile_load(4, asm.at(x, at))
        for part in range(p.n_parts):
            place = asm.add(asm.mul(at, p.n_parts), part * TILE)
            asm.tile_load_streamed(6, asm.at(weights, place))
            asm.tile_dot_bf16(0, 4, 6)
            asm.tile_load_streamed(7, asm.at(beside, place))
            asm.tile_dot_bf16(1, 4, 7)
            if part == 0:
                asm.tile_load(5, asm.at(below, at))
            asm.tile_dot_bf16(2, 5, 6)
            asm.tile_dot_bf16(3, 5, 7)
        return []

    asm.loop(0, p.n_steps, [], step)
    for tile, corner in enumerate(corners):
        asm.tile_store(tile, corner, ld_out)
