"""The quantized types with blocks of 32 weights."""

from __future__ import annotations

from collections.abc import Sequence

from llamatrio.backends.cpu.format_fields import nibble_words, with_fifth_bits
from llamatrio.backends.cpu.formats import Interleaved, RawBlocks
from llamatrio.backends.cpu.vector import Asm, Offset, Value, vf32, vi8, vi32
from llamatrio.model.ggml_type import GGMLType


class Block32(Interleaved):
    """d f16 [, m f16], [fifth bits], codes: the tile's scales are d[16] [, m[16]] as halves."""

    __slots__ = ()

    def pack_scales(self, asm: Asm, raw: RawBlocks, tile: int, base: Value, offset: Offset) -> None:
        for at in range(0, self.scale_bytes // 16, 2):
            asm.store(raw.halves(at), base, asm.add(offset, 16 * at))

    def load_scales(
        self, asm: Asm, base: Value, offset: Offset, head: Sequence[Value]
    ) -> tuple[list[Value], list[Value]]:
        scales = [asm.load_f16(base, offset)]
        if self.scale_bytes == 64:
            return scales, [asm.load_f16(base, asm.add(offset, 32))]
        return scales, self.offset_minima(asm, scales)


class _Q4(Block32):
    __slots__ = ()

    def read_codes(self, raw: RawBlocks, tile: int) -> list[Value]:
        return nibble_words(raw, self.scale_bytes // 16)


class _Q5(Block32):
    __slots__ = ()

    def read_codes(self, raw: RawBlocks, tile: int) -> list[Value]:
        bits_at = self.scale_bytes // 16
        return with_fifth_bits(raw, bits_at, nibble_words(raw, bits_at + 4))


class _Q8(Block32):
    __slots__ = ()

    def read_codes(self, raw: RawBlocks, tile: int) -> list[Value]:
        flip = raw.asm.splat_int(0x80808080)
        return [raw.asm.builder.xor(raw.words(2 + 4 * v), flip) for v in range(8)]


IQ4_CODES = tuple(level + 128 for level in (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))
"""The 16 levels of the non-linear 4-bit types, made unsigned."""


class _IQ4NL(_Q4):
    __slots__ = ()
    table = IQ4_CODES


class _MXFP4(Block32):
    """e u8 (a power of two), codes: FP4 values doubled to be integers, so the scale is 2^(e - 128)."""

    __slots__ = ()
    table = tuple(value + 12 for value in (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12))

    def read_codes(self, raw: RawBlocks, tile: int) -> list[Value]:
        return nibble_words(raw, 1)

    def pack_scales(self, asm: Asm, raw: RawBlocks, tile: int, base: Value, offset: Offset) -> None:
        asm.store(raw.bytes(0), base, offset)

    def load_scales(
        self, asm: Asm, base: Value, offset: Offset, head: Sequence[Value]
    ) -> tuple[list[Value], list[Value]]:
        b = asm.builder
        exponent = b.zext(asm.load(base, offset, vi8), vi32)
        normal = b.shl(b.sub(exponent, asm.splat_int(1)), asm.splat_int(23))
        subnormal = b.shl(asm.splat_int(0x00200000), exponent)
        is_small = b.icmp_unsigned("<", exponent, asm.splat_int(2))
        scales = [asm.bitcast(asm.select(is_small, subnormal, normal), vf32)]
        return scales, self.offset_minima(asm, scales)


Q8_0 = _Q8(GGMLType.Q8_0, stored_bits=8, scale_bytes=32, offset=128)

FORMATS_32 = (
    _Q4(GGMLType.Q4_0, stored_bits=4, scale_bytes=32, offset=8),
    _Q4(GGMLType.Q4_1, stored_bits=4, scale_bytes=64),
    _Q5(GGMLType.Q5_0, stored_bits=5, scale_bytes=32, offset=16),
    _Q5(GGMLType.Q5_1, stored_bits=5, scale_bytes=64),
    Q8_0,
    _IQ4NL(GGMLType.IQ4_NL, stored_bits=4, scale_bytes=32, offset=128),
    _MXFP4(GGMLType.MXFP4, stored_bits=4, scale_bytes=16, offset=12),
)
