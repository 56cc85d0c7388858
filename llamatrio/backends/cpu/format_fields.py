"""Lane-wise pieces that the readers of GGUF blocks share: lane r holds a word of row r."""

from __future__ import annotations

from llamatrio.backends.cpu.formats import RawBlocks
from llamatrio.backends.cpu.vector import Asm, Value, vi8, vi32


def byte_of(asm: Asm, words: Value, n: int) -> Value:
    """Byte n of each word, as 16 x i8."""
    return asm.builder.trunc(asm.builder.lshr(words, asm.splat_int(8 * n)), vi8)


def masked(asm: Asm, words: Value, shift: int, mask: int) -> Value:
    """(byte >> shift) & mask for each of the 4 bytes of each word; shift < 0 shifts left."""
    amount = asm.splat_int(abs(shift))
    moved = asm.builder.lshr(words, amount) if shift >= 0 else asm.builder.shl(words, amount)
    return asm.builder.and_(moved, asm.splat_int(mask * 0x01010101))


def nibble_words(raw: RawBlocks, offset: int) -> list[Value]:
    """16 bytes whose low halves are k 0..15 and whose high halves are k 16..31."""
    packed = [raw.words(offset + 4 * v) for v in range(4)]
    return [masked(raw.asm, word, shift, 15) for shift in (0, 4) for word in packed]


def with_fifth_bits(raw: RawBlocks, offset: int, low: list[Value]) -> list[Value]:
    """Adds bit 4 of the codes; bit k of the word at `offset` belongs to k."""
    b, asm = raw.asm.builder, raw.asm
    bits, words = raw.words(offset), []
    for v, word in enumerate(low):
        quad = b.and_(b.lshr(bits, asm.splat_int(4 * v)), asm.splat_int(15))
        # Copies at distance 7 put bit c of the quad at bit 8 c.
        spread = b.and_(b.mul(quad, asm.splat_int(0x00204081)), asm.splat_int(0x01010101))
        words.append(b.or_(word, b.shl(spread, asm.splat_int(4))))
    return words


def k_scales(raw: RawBlocks, offset: int, tile: int) -> tuple[Value, Value]:
    """The 6-bit scale and minimum of group `tile` out of the 12 bytes that Q4_K and Q5_K keep them in."""
    asm, b = raw.asm, raw.asm.builder
    first, second, third = (raw.words(offset + 4 * n) for n in range(3))
    if tile < 4:
        return byte_of(asm, masked(asm, first, 0, 63), tile), byte_of(asm, masked(asm, second, 0, 63), tile)
    scale = b.or_(masked(asm, third, 0, 15), masked(asm, first, 2, 0x30))
    minimum = b.or_(masked(asm, third, 4, 15), masked(asm, second, 2, 0x30))
    return byte_of(asm, scale, tile - 4), byte_of(asm, minimum, tile - 4)


def bytes_f32(asm: Asm, v: Value, *, signed: bool) -> Value:
    """16 x i8 as 16 x f32."""
    wide = asm.builder.sext(v, vi32) if signed else asm.builder.zext(v, vi32)
    return asm.to_f32(wide)
