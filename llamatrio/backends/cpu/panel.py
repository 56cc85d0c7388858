"""The panel kernels: many rows at once, on AMX tiles.

A panel is 32 columns of the output (two groups). Loops, from the outside: 16 panels; a chunk of about 512 k, whose
weights are dequantized to bf16 in pairs of k, as the tiles want them; 32 rows; the panels. So the 32 rows of x (at
most 40 KB) stay in the first-level cache while the weights (at most 640 KB) stream past them from the second. An
output of 32 x 32 is four tiles that stay in registers over the chunk; from chunk to chunk they are kept in `out` as
f32, which loses nothing. Every row is summed in the same order, wherever it stands and however many there are.

The rows of `out` should be an odd number of 64-byte lines apart (linear.row_stride): at even ones, above all powers of
two, the 32 rows of a tile fall into few sets of the cache, and storing them was seen to take a third longer.

F16 weights take activations in f16 and both are split in two bf16, as rounding them to bf16 costs more than f16 models
may lose; of the four products the least, at 2^-16, is left out.

At the edges (fewer than 32 rows left, or one group) the tiles go through 4 KB of scratch instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from llamatrio.backends.cpu.compile import Emit
from llamatrio.backends.cpu.formats import ROWS, Format
from llamatrio.backends.cpu.formats_float import FloatFormat
from llamatrio.backends.cpu.panel_operands import TILE, split_activations, write_weights
from llamatrio.backends.cpu.vector import Asm, Value, vf32
from llamatrio.model.ggml_type import GGMLType

CHUNK = 512
"""Values of k that are dequantized at a time; a multiple of every type's block."""
LONGEST_CHUNK = 640
"""The last chunk takes what is left, up to this."""
PANELS = 16
_EDGE_STRIDE = 128
_EDGE_BYTES = 32 * _EDGE_STRIDE


def scratch_bytes(k: int) -> int:
    """Bytes of scratch that a panel kernel needs for rows of `k` weights."""
    chunk = min(k, LONGEST_CHUNK)
    return PANELS * 2 * ROWS * chunk * 2 + _EDGE_BYTES + 2 * 32 * chunk * 2


_PRODUCTS = ((0, 0),)
_SPLIT_PRODUCTS = ((0, 0), (0, 1), (1, 0))
"""(part of x, part of the weights), in the order of their loads."""


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
    split_x: Value
    """Room for 32 rows of the chunk in two parts."""
    is_split: bool

    @property
    def n_parts(self) -> int:
        """Tiles of bf16 that stand for 32 k of a group of weights."""
        return 2 if self.is_split else 1


class _Operands(NamedTuple):
    """32 rows of x and 32 columns of weights: where their tiles are."""

    x: Value
    below: Value
    """The next 16 rows."""
    to_lower: Value
    """Bytes from a tile of x to its second part."""
    weights: Value
    beside: Value
    """The next 16 columns."""


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
        split_x = asm.at(edge, _EDGE_BYTES)
        is_split = made.type == GGMLType.F16
        split_bytes = asm.mul(asm.minimum(k, asm.int64(LONGEST_CHUNK)), 2 * 32 * 2)
        room = asm.at(split_x, split_bytes if is_split else 0)
        n_parts = 2 if is_split else 1
        n_groups = 2 * PANELS // n_parts
        group_stride = made.row_bytes(asm, k)
        asm.tile_config()

        def panels(first: Value, _: list[Value]) -> list[Value]:
            last = asm.minimum(g1, asm.add(first, n_groups))

            def chunk(at: Value, length: Value) -> None:
                group_bytes = asm.mul(length, 2 * ROWS * n_parts)

                def dequantize(g: Value, _: list[Value]) -> list[Value]:
                    start = asm.at(weights, asm.add(asm.mul(g, group_stride), made.row_bytes(asm, at)))
                    place = asm.at(room, asm.mul(asm.builder.sub(g, first), group_bytes))
                    write_weights(asm, made, start, place, length, group_stride, split=is_split)
                    return []

                asm.loop(first, last, [], dequantize)
                product = _Product(
                    x=asm.at(source, asm.mul(asm.div(at, 32), TILE)),
                    x_stride=asm.mul(asm.div(k, 32), TILE),
                    out=asm.at(target, asm.mul(first, 4 * ROWS)),
                    ld_out=ld_out,
                    edge=edge,
                    m=m,
                    n_steps=asm.div(length, 32),
                    is_first=asm.equal(at, 0),
                    split_x=split_x,
                    is_split=is_split,
                )
                _multiply(asm, product, room, asm.builder.sub(last, first))

            _for_each_chunk(asm, k, chunk)
            return []

        asm.loop(g0, g1, [], panels, step=n_groups)
        asm.tile_release()

    return emit


def _for_each_chunk(asm: Asm, k: Value, body: Callable[[Value, Value], None]) -> None:
    """body(start, length) for the chunks of k."""

    def chunk(at: Value, _: list[Value]) -> list[Value]:
        left = asm.builder.sub(k, at)
        body(at, asm.select(asm.less(left, LONGEST_CHUNK + 1), left, asm.int64(CHUNK)))
        return []

    # No chunk starts at what a last one longer than CHUNK has taken.
    stop = asm.maximum(asm.add(k, CHUNK - LONGEST_CHUNK), asm.int64(1))
    asm.loop(0, stop, [], chunk, step=CHUNK)


def _multiply(asm: Asm, p: _Product, room: Value, n_groups: Value) -> None:
    """out[m][16 n_groups] (+)= the chunk of x times the groups dequantized in `room`."""
    group_bytes = asm.mul(p.n_steps, TILE * p.n_parts)
    n_whole = asm.builder.and_(n_groups, asm.int64(-2))

    def rows(row: Value, _: list[Value]) -> list[Value]:
        n_rows = asm.minimum(asm.builder.sub(p.m, row), asm.int64(32))
        given = asm.at(p.x, asm.mul(asm.div(row, 16), p.x_stride))
        x, x_stride, to_lower = _parts_of_x(asm, p, given)
        out = asm.at(p.out, asm.mul(row, p.ld_out))
        is_whole = asm.equal(n_rows, 32)

        def panel(g: Value, _: list[Value]) -> list[Value]:
            weights, columns = asm.at(room, asm.mul(g, group_bytes)), asm.at(out, asm.mul(g, 4 * ROWS))
            at = _Operands(x, asm.at(x, x_stride), to_lower, weights, asm.at(weights, group_bytes))
            for half in (2, 3):  # of the next 32 rows, a tile for each panel done here
                asm.prefetch_lines(given, asm.add(asm.mul(p.x_stride, half), asm.mul(asm.div(g, 2), TILE)), TILE)
            with asm.choose(is_whole) as (whole, edge):
                with whole:
                    _tiles(asm, p, at, columns, p.ld_out)
                with edge:
                    _edge(asm, p, at, columns, n_rows, n_vectors=2)
            return []

        asm.loop(0, n_whole, [], panel, step=2)
        with asm.when(asm.less(n_whole, n_groups)):  # the second group's columns are computed from the first's weights
            weights, columns = asm.at(room, asm.mul(n_whole, group_bytes)), asm.at(out, asm.mul(n_whole, 4 * ROWS))
            at = _Operands(x, asm.at(x, x_stride), to_lower, weights, weights)
            _edge(asm, p, at, columns, n_rows, n_vectors=1)
        return []

    asm.loop(0, p.m, [], rows, step=32)


def _parts_of_x(asm: Asm, p: _Product, x: Value) -> tuple[Value, Value, Value]:
    """32 rows of the chunk as the tiles take them: address, bytes to the next 16 rows, bytes to the second part."""
    if not p.is_split:
        return x, p.x_stride, asm.int64(0)
    chunk_bytes = asm.mul(p.n_steps, TILE)
    to_lower = asm.mul(chunk_bytes, 2)
    split_activations(asm, x, p.split_x, p.n_steps, to_lower)
    split_activations(asm, asm.at(x, p.x_stride), asm.at(p.split_x, chunk_bytes), p.n_steps, to_lower)
    return p.split_x, chunk_bytes, to_lower


def _edge(asm: Asm, p: _Product, at: _Operands, out: Value, n_rows: Value, n_vectors: int) -> None:
    """As _tiles, but only n_rows rows and 16 n_vectors columns of the output are read and written."""

    def copy(source: Value, source_stride: Value, target: Value, target_stride: Value) -> None:
        def row(r: Value, _: list[Value]) -> list[Value]:
            for column in range(0, 64 * n_vectors, 64):
                value = asm.load(source, asm.add(asm.mul(r, source_stride), column), vf32)
                asm.store(value, target, asm.add(asm.mul(r, target_stride), column))
            return []

        asm.loop(0, n_rows, [], row)

    stride = asm.int64(_EDGE_STRIDE)
    copy(out, p.ld_out, p.edge, stride)
    _tiles(asm, p, at, p.edge, stride)
    copy(p.edge, stride, out, p.ld_out)


def _tiles(asm: Asm, p: _Product, at: _Operands, out: Value, ld_out: Value) -> None:
    """out[32][32] (+)= 32 rows of x times two groups. Tiles: 0 1 / 2 3 the output, 4 / 5 x, 6 7 the weights."""
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
        loaded: int | None = None
        for x_part, w_part in _SPLIT_PRODUCTS if p.is_split else _PRODUCTS:
            x_at = asm.add(asm.mul(i, TILE), asm.mul(at.to_lower, x_part))
            w_at = asm.add(asm.mul(i, TILE * p.n_parts), TILE * w_part)
            if x_part != loaded:
                asm.tile_load(4, asm.at(at.x, x_at))
            asm.tile_load_streamed(6, asm.at(at.weights, w_at))
            asm.tile_dot_bf16(0, 4, 6)
            asm.tile_load_streamed(7, asm.at(at.beside, w_at))
            asm.tile_dot_bf16(1, 4, 7)
            if x_part != loaded:
                asm.tile_load(5, asm.at(at.below, x_at))
            asm.tile_dot_bf16(2, 5, 6)
            asm.tile_dot_bf16(3, 5, 7)
            loaded = x_part
        return []

    asm.loop(0, p.n_steps, [], step)
    for tile, corner in enumerate(corners):
        asm.tile_store(tile, corner, ld_out)
