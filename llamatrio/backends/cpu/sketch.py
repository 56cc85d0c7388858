"""A sketch of a Q8_0 matrix: about half of its bytes, and a product that is never below the matrix's own.

Theory of operation. A code u = q + 128 is 16 h + l. The sketch keeps h, and takes 7.5 for every l; for a block of 32
weights and the codes x of an activation that leaves out

    d s sum((l - 7.5) x)  <=  |d| s |l - 7.5| |x|                (Cauchy and Schwarz; s the scale of x)

so with e = |d| |l - 7.5| beside each block's d, the sketch's product

    s (16 d sum(h x) - 120.5 d sum(x) + e |x|)

is an upper bound of the block's, and the sum over blocks is one of the logit. As a packed type (formats.py) it has one
scale and two minima: the ordinary rows kernel computes it.

Rounding. With u = 2^-24 and n blocks to a row, it makes the two sums differ by less than u (3,600 + 1,450 n) times the
sum of d s |x| (terms are at most 127 sqrt(32) d s |x|), or twice that without fused multiply-add. As |l - 7.5| is at
least 2.8, a bound larger by 1 / 64 covers it, and the rounding of e to f16, for rows of up to 4,096 weights.
"""

from __future__ import annotations

from collections.abc import Sequence

from llamatrio.backends.cpu.activations import BLOCK, BLOCK_BYTES, LENGTH
from llamatrio.backends.cpu.compile import compile_kernel
from llamatrio.backends.cpu.format_fields import masked
from llamatrio.backends.cpu.formats import RawBlocks
from llamatrio.backends.cpu.formats_32 import Block32
from llamatrio.backends.cpu.levels import Level
from llamatrio.backends.cpu.vector import Asm, Offset, Value, i8, i32, vec
from llamatrio.model.ggml_type import GGMLType

LONGEST_ROW = 4096
"""Weights of a row up to which the bound is sure to hold."""
_MARGIN = 1 + 1 / 64
_LEAST = 2.0**-24
"""Added to e: below 2^-14 the steps of f16 are 2^-24."""


class _Q8Sketch(Block32):
    __slots__ = ()

    @property
    def name(self) -> str:
        return "q8_0_sketch"

    def read_codes(self, raw: RawBlocks, tile: int) -> list[Value]:
        return [masked(raw.asm, word, 4, 15) for word in _unsigned_words(raw)]

    def pack_scales(self, asm: Asm, raw: RawBlocks, tile: int, base: Value, offset: Offset) -> None:
        b = asm.builder
        squares: Value = asm.zero(vec(i32))
        for word in _unsigned_words(raw):
            low = masked(asm, word, 0, 15)
            for c in range(4):
                code = b.and_(b.lshr(low, asm.splat_int(8 * c)), asm.splat_int(15))
                left_out = b.sub(b.add(code, code), asm.splat_int(15))  # 2 (l - 7.5)
                squares = b.add(squares, b.mul(left_out, left_out))
        halves = raw.halves(0)
        scale = asm.fabs(asm.f16_to_f32(halves))
        bound = asm.fmul(scale, asm.fmul(asm.sqrt(asm.to_f32(squares)), asm.splat_f32(0.5 * _MARGIN)))
        asm.store(halves, base, offset)
        asm.store_f16(asm.fadd(bound, asm.splat_f32(_LEAST)), base, asm.add(offset, 32))

    def load_scales(
        self, asm: Asm, base: Value, offset: Offset, head: Sequence[Value]
    ) -> tuple[list[Value], list[Value]]:
        scale, bound = asm.load_f16(base, offset), asm.load_f16(base, asm.add(offset, 32))
        return [asm.fmul(scale, asm.splat_f32(16.0))], [asm.fmul(scale, asm.splat_f32(-120.5)), bound]


def _unsigned_words(raw: RawBlocks) -> list[Value]:
    flip = raw.asm.splat_int(0x80808080)
    return [raw.asm.builder.xor(raw.words(2 + 4 * v), flip) for v in range(8)]


Q8_SKETCH = _Q8Sketch(GGMLType.Q8_0, stored_bits=4, scale_bytes=64)


def lengths_kernel(level: Level | None = None) -> int:
    """Kernel (x, m, k): notes in the q8 records of m rows how long their integers are as a vector."""

    def emit(asm: Asm, x: Value, m: Value, k: Value) -> None:
        records = asm.pointer(x)

        def record(i: Value, _: list[Value]) -> list[Value]:
            at, total = asm.mul(i, BLOCK_BYTES), asm.zero(vec(i32))
            for half in range(2):
                codes = asm.builder.sext(asm.load(records, asm.add(at, 16 * half), vec(i8)), vec(i32))
                total = asm.builder.add(total, asm.builder.mul(codes, codes))
            asm.store(asm.sqrt(asm.to_f32(asm.reduce_add_int(total))), records, asm.add(at, LENGTH))
            return []

        asm.loop(0, asm.mul(m, asm.div(k, BLOCK)), [], record)

    return compile_kernel("lengths", emit, level)
