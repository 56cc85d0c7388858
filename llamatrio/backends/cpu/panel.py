"""The panel kernels: many rows at once, on AMX tiles.

The weights of 32 columns (two groups) are dequantized once to bf16, in pairs of k as the tiles want them, and
multiplied with all rows; each 32 rows x 32 columns of the output are four tiles of f32, accumulated over k without
leaving the tile registers. Every row is summed in the same order, wherever it stands.

Scratch: two dequantized groups (64 k bytes), then 32 x 32 f32 for output that must not be stored whole.
"""

from __future__ import annotations

from llamatrio.backends.cpu.compile import Emit
from llamatrio.backends.cpu.formats import ROWS, Format
from llamatrio.backends.cpu.formats_float import FloatFormat
from llamatrio.backends.cpu.rows import PREFETCH, for_each_tile
from llamatrio.backends.cpu.vector import Asm, Value, vf32, vi32
from llamatrio.model.ggml_type import GGMLType

TILE = 1024
"""Bytes of an AMX tile: 16 rows of 64."""
_SPARE = 32 * 32 * 4


def scratch_bytes(k: int) -> int:
    """Bytes of scratch that a panel kernel needs for rows of `k` weights."""
    return 2 * ROWS * k * 2 + _SPARE


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
        weights, source, target, room = (asm.pointer(a) for a in (w, x, out, scratch))
        size = group_stride(asm, made, k)
        panel_bytes = asm.mul(k, 2 * ROWS)
        spare = asm.at(room, asm.mul(panel_bytes, 2))
        asm.tile_config()

        def panel(g: Value, _: list[Value]) -> list[Value]:
            has_second = asm.less(asm.add(g, 1), g1)
            first = _dequantized(asm, made, asm.at(weights, asm.mul(g, size)), room, k)
            beside = asm.at(weights, asm.mul(asm.select(has_second, asm.add(g, 1), g), size))
            second = _dequantized(asm, made, beside, asm.at(room, panel_bytes), k)
            out_columns = asm.at(target, asm.mul(g, 4 * ROWS))
            _multiply(asm, source, (first, second), out_columns, spare, m, k, ld_out, has_second)
            return []

        asm.loop(g0, g1, [], panel, step=2)
        asm.tile_release()

    return emit


def group_stride(asm: Asm, made: Format | FloatFormat, k: Value) -> Value:
    if isinstance(made, FloatFormat):
        return asm.mul(asm.div(k, 32), made.tile_bytes)
    return asm.mul(asm.div(k, 32 * made.n_tiles), made.block_bytes)


def _dequantized(asm: Asm, made: Format | FloatFormat, weights: Value, room: Value, k: Value) -> Value:
    """One group as bf16 [k / 2][16][2]: written to `room`, or where it already is."""
    if isinstance(made, FloatFormat):
        if made.type == GGMLType.BF16:
            return weights
        _convert_group(asm, made, weights, room, k)
    else:
        _dequantize_group(asm, made, weights, room, k)
    return room


def _convert_group(asm: Asm, made: FloatFormat, weights: Value, room: Value, k: Value) -> None:
    def tile(i: Value, _: list[Value]) -> list[Value]:
        offset = asm.mul(i, made.tile_bytes)
        for pair in range(16):
            even, odd = made.load_pair(asm, weights, offset, pair)
            asm.store(asm.bf16_pairs(even, odd), room, asm.add(asm.mul(i, TILE), 64 * pair), align=64)
        return []

    asm.loop(0, asm.div(k, 32), [], tile)


def _dequantize_group(asm: Asm, made: Format, weights: Value, room: Value, k: Value) -> None:
    b = asm.builder

    def step(offset: Value, index: Value, head: list[Value], carried: list[Value]) -> list[Value]:
        for line in range(0, made.tile_bytes, 64):
            asm.prefetch(weights, asm.add(offset, PREFETCH + line))
        codes, scales, minima = made.unpack(asm, weights, offset, head)
        for v, quad in enumerate(codes):
            lanes = asm.bitcast(quad, vi32)
            half = v * len(scales) // 8
            values = []
            for c in range(4):
                code = b.and_(b.lshr(lanes, asm.splat_int(8 * c)), asm.splat_int(0xFF))
                values.append(asm.fma(scales[half], asm.to_f32(code), minima[half]))
            at = asm.add(asm.mul(index, TILE), 128 * v)
            asm.store(asm.bf16_pairs(values[0], values[1]), room, at, align=64)
            asm.store(asm.bf16_pairs(values[2], values[3]), room, asm.add(at, 64), align=64)
        return []

    for_each_tile(asm, made, weights, k, [], step)


def _multiply(
    asm: Asm,
    x: Value,
    panels: tuple[Value, Value],
    out: Value,
    spare: Value,
    m: Value,
    k: Value,
    ld_out: Value,
    has_second: Value,
) -> None:
    """out[m][32] = x times the two panels; the second panel's columns only if has_second."""
    row_tile_bytes = asm.mul(asm.div(k, 32), TILE)
    whole = asm.builder.and_(m, asm.int64(-32))

    def full(row: Value, _: list[Value]) -> list[Value]:
        top = asm.at(out, asm.mul(row, ld_out))
        bottom = asm.at(top, asm.mul(ld_out, 16))
        _tiles(asm, asm.at(x, asm.mul(asm.div(row, 16), row_tile_bytes)), row_tile_bytes, panels, k)
        asm.tile_store(0, top, ld_out)
        asm.tile_store(2, bottom, ld_out)
        with asm.when(has_second):
            asm.tile_store(1, asm.at(top, 64), ld_out)
            asm.tile_store(3, asm.at(bottom, 64), ld_out)
        return []

    asm.loop(0, whole, [], full, step=32)
    with asm.when(asm.less(whole, m)):
        _tiles(asm, asm.at(x, asm.mul(asm.div(whole, 16), row_tile_bytes)), row_tile_bytes, panels, k)
        for tile, at in enumerate((0, 64, 16 * 128, 16 * 128 + 64)):
            asm.tile_store(tile, asm.at(spare, at), asm.int64(128))

        def copy(row: Value, _: list[Value]) -> list[Value]:
            source, target = asm.mul(asm.builder.sub(row, whole), 128), asm.mul(row, ld_out)
            asm.store(asm.load(spare, source, vf32), out, target)
            with asm.when(has_second):
                asm.store(asm.load(spare, asm.add(source, 64), vf32), out, asm.add(target, 64))
            return []

        asm.loop(whole, m, [], copy)


def _tiles(asm: Asm, x: Value, row_tile_bytes: Value, panels: tuple[Value, Value], k: Value) -> None:
    """Tiles 0, 1 (16 rows) and 2, 3 (the next 16) = 32 rows at x times the two panels."""
    below = asm.at(x, row_tile_bytes)
    for tile in range(4):
        asm.tile_zero(tile)

    def step(i: Value, _: list[Value]) -> list[Value]:
        at = asm.mul(i, TILE)
        asm.tile_load(4, asm.at(x, at))
        asm.tile_load(6, asm.at(panels[0], at))
        asm.tile_dot_bf16(0, 4, 6)
        asm.tile_load(7, asm.at(panels[1], at))
        asm.tile_dot_bf16(1, 4, 7)
        asm.tile_load(5, asm.at(below, at))
        asm.tile_dot_bf16(2, 5, 6)
        asm.tile_dot_bf16(3, 5, 7)
        return []

    asm.loop(0, asm.div(k, 32), [], step)
