"""The rows kernels: a few rows of activations times packed weights, at the speed at which the weights can be read.

A tile of weights is unpacked once and used for up to 8 rows; the row counts 8, 4, 2, 1 are separate inner loops, and m
rows are cut into them from the largest down (16 at once spill registers: slower than 8 twice). Every row goes through
the same operations in the same order whichever loop it falls into, so its result is the same bits in any company.

Tried and slower: AMX int8 tiles for 4 to 16 rows. The codes reach a tile only through memory, and at 8 rows that took
twice as long as the dot products.

Quantized weights, per tile of 32 k and per row, with integers I = dot(codes, x) and S = sum(x) of the q8 record:

    acc = fma(x_scale, fma(w_scale, I, w_minimum * S), acc)

Without VNNI, 8-bit codes are taken as signed bytes, less 128, and there is no minimum.

Where a type has a scale for each 16 weights, the middle term is the sum over the halves: first the minima's
products, then the scales'. A sketch (sketch.py) has a second minimum, which meets the length of x.
"""

from __future__ import annotations

from collections.abc import Callable

from llamatrio.backends.cpu.activations import BLOCK, BLOCK_BYTES, LENGTH, SCALE, SUM, SUM_HIGH, SUM_LOW
from llamatrio.backends.cpu.compile import Emit
from llamatrio.backends.cpu.formats import ROWS, Format, Unpacked
from llamatrio.backends.cpu.formats_float import FloatFormat
from llamatrio.backends.cpu.vector import Asm, Near, Value, f32, i8, i32, vbytes, vf32

PREFETCH = 16384
"""Bytes ahead of the weights in use that are asked for: the hardware's own prefetcher halts at page ends."""
_ROWS_IN_CACHE = 64
"""Rows that go over all of a thread's weights before the next ones start: their activations stay in L2."""


def _nearness(asm: Asm) -> Near:
    """Where weights are asked to."""
    return "past" if asm.level.streams_weights else "L2"


RowTile = Callable[[Asm, int, Value, Value, Value, Value, Value], None]
"""tile(asm, n_rows, weights, x, k, out, ld_out): n_rows rows of x times one group, into 16 columns of out."""


def _emit_rows(group_bytes: Callable[[Asm, Value], Value], x_stride: int, tile: RowTile) -> Emit:
    """The rows kernel around a tile. Rows of x are k * x_stride bytes apart."""

    def emit(asm: Asm, w: Value, x: Value, out: Value, m: Value, k: Value, ld_out: Value, g0: Value, g1: Value) -> None:
        weights, source, target = asm.pointer(w), asm.pointer(x), asm.pointer(out)
        size, ld_x = group_bytes(asm, k), asm.mul(k, x_stride)

        def rows_in_cache(first: Value, _: list[Value]) -> list[Value]:
            last = asm.minimum(m, asm.add(first, _ROWS_IN_CACHE))

            def group(g: Value, _: list[Value]) -> list[Value]:
                group_weights = asm.at(weights, asm.mul(g, size))
                group_out = asm.at(target, asm.mul(g, 4 * ROWS))

                def tiles_of(n_rows: int, start: Value, stop: Value) -> None:
                    def one(row: Value, _: list[Value]) -> list[Value]:
                        x_rows = asm.at(source, asm.mul(row, ld_x))
                        tile(asm, n_rows, group_weights, x_rows, k, asm.at(group_out, asm.mul(row, ld_out)), ld_out)
                        return []

                    asm.loop(start, stop, [], one, step=n_rows)

                _cut_rows(asm, first, last, tiles_of)
                return []

            asm.loop(g0, g1, [], group)
            return []

        asm.loop(0, m, [], rows_in_cache, step=_ROWS_IN_CACHE)

    return emit


def _cut_rows(asm: Asm, first: Value, last: Value, tiles_of: Callable[[int, Value, Value], None]) -> None:
    """Covers the rows first .. last with tiles of level.row_tile, half of it, ... 1 rows."""
    start, n_rows = first, asm.level.row_tile
    while n_rows:
        whole = asm.builder.and_(asm.builder.sub(last, start), asm.int64(-n_rows))
        stop = asm.add(start, whole)
        tiles_of(n_rows, start, stop)
        start, n_rows = stop, n_rows // 2


# ---- quantized weights


def quantized_rows(made: Format) -> Emit:
    """The rows kernel of a quantized type; x in the form q8."""

    def tile(asm: Asm, n_rows: int, weights: Value, x: Value, k: Value, out: Value, ld_out: Value) -> None:
        ld_x = asm.mul(k, BLOCK_BYTES // BLOCK)
        rows = [asm.at(x, asm.mul(ld_x, r)) for r in range(n_rows)]

        def step(offset: Value, index: Value, head: list[Value], acc: list[Value]) -> list[Value]:
            ahead = asm.add(made.position(asm, offset, index), PREFETCH)
            asm.prefetch_lines(weights, ahead, made.tile_bytes, _nearness(asm))
            unpacked = made.unpack(asm, weights, offset, head)
            return add_products(asm, made, unpacked, [asm.at(row, asm.mul(index, BLOCK_BYTES)) for row in rows], acc)

        acc = for_each_tile(asm, made, weights, k, [asm.zero(vf32)] * n_rows, step)
        for r, total in enumerate(acc):
            asm.store(total, out, asm.mul(ld_out, r))

    return _emit_rows(made.row_bytes, BLOCK_BYTES // BLOCK, tile)


def for_each_tile(
    asm: Asm,
    made: Format,
    weights: Value,
    k: Value,
    carried: list[Value],
    step: Callable[[Value, Value, list[Value], list[Value]], list[Value]],
) -> list[Value]:
    """carried = step(byte offset of the tile, its index, the head above it, carried), over a group's tiles."""

    def block(i: Value, carried: list[Value]) -> list[Value]:
        start = asm.mul(i, made.block_bytes)
        head = made.load_head(asm, weights, start)
        if made.n_tiles == 1:
            return step(start, i, head, carried)

        def tile(t: Value, carried: list[Value]) -> list[Value]:
            offset = asm.add(start, asm.mul(t, made.tile_stride), made.head_bytes)
            return step(offset, asm.add(asm.mul(i, made.n_tiles), t), head, carried)

        return asm.loop(0, made.n_tiles, carried, tile)

    return asm.loop(0, asm.div(k, 32 * made.n_tiles), carried, block)


def add_products(asm: Asm, made: Format, w: Unpacked, records: list[Value], acc: list[Value]) -> list[Value]:
    """acc + 32 k of as many rows; `records` point at the rows' q8 records."""
    if made.offset == 128 and asm.level.dot != "vnni":
        w = _signed(asm, w)
    return [_add_product(asm, made, w, record, a) for record, a in zip(records, acc, strict=True)]


def _signed(asm: Asm, w: Unpacked) -> Unpacked:
    """8-bit codes as signed bytes, which have no minimum."""
    flip = asm.splat_int(0x80, i8, 64)
    return Unpacked([asm.builder.xor(codes, flip) for codes in w.codes], w.scales, [])


def _add_product(asm: Asm, made: Format, w: Unpacked, record: Value, acc: Value) -> Value:
    """acc + 32 k of one row; `record` points at the row's q8 record."""
    x = [asm.bitcast(asm.load_splat(record, 4 * v, i32), vbytes) for v in range(8)]
    n = len(w.scales)
    total = None
    for minimum, at in zip(w.minima, (SUM, LENGTH) if n == 1 else (SUM_LOW, SUM_HIGH), strict=False):
        of_x = asm.load_splat(record, at)
        total = asm.fmul(minimum, of_x) if total is None else asm.fma(minimum, of_x, total)
    for part, scale in enumerate(w.scales):
        quads = slice(part * 8 // n, (part + 1) * 8 // n)
        if w.minima:
            integer = asm.dot(w.codes[quads], x[quads], made.code_bits)
        else:
            integer = asm.dot_signed(w.codes[quads], x[quads])
        product = asm.to_f32(integer)
        total = asm.fmul(scale, product) if total is None else asm.fma(scale, product, total)
    return asm.fma(asm.load_splat(record, SCALE), total, acc)


# ---- float weights


def float_rows(made: FloatFormat) -> Emit:
    """The rows kernel of F32, F16 or BF16; x in the form f32.

    Even and odd k are summed apart: two chains of fma hide more of their latency than one.
    """

    def tile(asm: Asm, n_rows: int, weights: Value, x: Value, k: Value, out: Value, ld_out: Value) -> None:
        ld_x = asm.mul(k, 4)
        rows = [asm.at(x, asm.mul(ld_x, r)) for r in range(n_rows)]

        def step(i: Value, acc: list[Value]) -> list[Value]:
            offset, at = asm.mul(i, made.tile_bytes // 4), asm.mul(i, 4 * 8)
            asm.prefetch_lines(weights, asm.add(offset, PREFETCH), made.tile_bytes // 4, _nearness(asm))
            acc = list(acc)
            for pair in range(4):
                for parity, weight in enumerate(made.load_pair(asm, weights, offset, pair)):
                    for r, row in enumerate(rows):
                        value = asm.load_splat(row, asm.add(at, 4 * (2 * pair + parity)), f32)
                        acc[2 * r + parity] = asm.fma(weight, value, acc[2 * r + parity])
            return acc

        acc = asm.loop(0, asm.div(k, 8), [asm.zero(vf32)] * (2 * n_rows), step)
        for r in range(n_rows):
            asm.store(asm.fadd(acc[2 * r], acc[2 * r + 1]), out, asm.mul(ld_out, r))

    return _emit_rows(made.row_bytes, 4, tile)
