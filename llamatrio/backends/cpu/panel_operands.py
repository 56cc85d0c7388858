"""What the AMX tiles multiply: weights and activations as bf16.

A tile of weights is 32 k of 16 columns as bf16 [16][16][2], pairs of k; a tile of activations 16 rows of 32 k. Where
plain bf16 would lose digits that the model has, an operand is the sum of two bf16, the upper digits and what they
leave: exact for f16, whose 11 digits are 8 and 3.
"""

from __future__ import annotations

from collections.abc import Callable

from llamatrio.backends.cpu.formats import Format
from llamatrio.backends.cpu.formats_float import FloatFormat
from llamatrio.backends.cpu.rows import for_each_tile
from llamatrio.backends.cpu.vector import Asm, Value, vf32, vi16, vi32

TILE = 1024
"""Bytes of an AMX tile: 16 rows of 64."""


def write_weights(
    asm: Asm, made: Format | FloatFormat, weights: Value, room: Value, k: Value, to_next: Value, *, split: bool
) -> None:
    """k weights of one group to tiles at `room`; split: two tiles for each 32 k, one behind the other.

    `to_next` bytes on are the weights that will be wanted next: they are asked for.
    """
    if isinstance(made, Format):
        _dequantize(asm, made, weights, room, k, to_next)
    else:
        parts_of = _split_pair if split else _rounded_pair
        _convert(asm, made, weights, room, k, to_next, parts_of)


def _convert(
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


def _rounded_pair(asm: Asm, even: Value, odd: Value) -> list[Value]:
    return [asm.bf16_pairs(even, odd)]


def _split_pair(asm: Asm, even: Value, odd: Value) -> list[Value]:
    (upper_even, lower_even), (upper_odd, lower_odd) = (_split(asm, v) for v in (even, odd))
    return [asm.bf16_pairs(upper_even, upper_odd), asm.bf16_pairs(lower_even, lower_odd)]


def _split(asm: Asm, v: Value) -> tuple[Value, Value]:
    """16 x f32 as its upper 8 digits and the rest."""
    upper = asm.bitcast(asm.builder.and_(asm.bitcast(v, vi32), asm.splat_int(0xFFFF0000)), vf32)
    return upper, asm.fsub(v, upper)


def _dequantize(asm: Asm, made: Format, weights: Value, room: Value, k: Value, to_next: Value) -> None:
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


def split_activations(asm: Asm, x: Value, room: Value, n_tiles: Value, to_lower: Value) -> None:
    """n_tiles tiles of f16 at x to the upper digits' tiles at `room` and the rest's tiles `to_lower` bytes behind."""

    def row(i: Value, _: list[Value]) -> list[Value]:
        for at in (0, 32):
            offset = asm.add(asm.mul(i, 64), at)
            upper, lower = _split(asm, asm.f16_to_f32(asm.load(x, offset, vi16)))
            asm.store(asm.f32_to_bf16(upper), room, offset)
            asm.store(asm.f32_to_bf16(lower), room, asm.add(to_lower, offset))
        return []

    asm.loop(0, asm.mul(n_tiles, 16), [], row)
