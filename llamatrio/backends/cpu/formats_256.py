"""The quantized types with blocks of 256 weights: integer scales under one or two f16 scales."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from llamatrio.backends.cpu.format_fields import byte_of, bytes_f32, k_scales, masked, nibble_words
from llamatrio.backends.cpu.formats import Interleaved, RawBlocks
from llamatrio.backends.cpu.formats_32 import IQ4_CODES
from llamatrio.backends.cpu.vector import Asm, Offset, Value, i8, vi8, vi32
from llamatrio.model.ggml_type import GGMLType, block_shape


class _Q4K(Interleaved):
    """d, dmin f16; 8 x (6-bit scale, 6-bit minimum) in 12 bytes; [32 bytes of fifth bits]; 128 bytes of nibbles."""

    __slots__ = ()

    def read_codes(self, raw: RawBlocks, tile: int) -> list[Value]:
        codes_at = block_shape(self.type).n_bytes - 128
        packed = [raw.words(codes_at + 32 * (tile // 2) + 4 * v) for v in range(8)]
        return [masked(raw.asm, word, 4 * (tile % 2), 15) for word in packed]

    def pack_scales(self, asm: Asm, raw: RawBlocks, tile: int, base: Value, offset: Offset) -> None:
        scale, minimum = k_scales(raw, 4, tile)
        asm.store(scale, base, offset)
        asm.store(minimum, base, asm.add(offset, 16))

    def load_scales(
        self, asm: Asm, base: Value, offset: Offset, head: Sequence[Value]
    ) -> tuple[list[Value], list[Value]]:
        scale = bytes_f32(asm, asm.load(base, offset, vi8), signed=False)
        minimum = bytes_f32(asm, asm.load(base, asm.add(offset, 16), vi8), signed=False)
        return [asm.fmul(head[0], scale)], [asm.fneg(asm.fmul(head[1], minimum))]


class _Q5K(_Q4K):
    __slots__ = ()

    def read_codes(self, raw: RawBlocks, tile: int) -> list[Value]:
        asm = raw.asm
        low = _Q4K.read_codes(self, raw, tile)
        high = [asm.builder.shl(masked(asm, raw.words(16 + 4 * v), tile, 1), asm.splat_int(4)) for v in range(8)]
        return [asm.builder.or_(a, b) for a, b in zip(low, high, strict=True)]


class _SignedScales(Interleaved):
    """Signed formats with one head scale d, and in each tile one or two signed bytes of scale for each row."""

    __slots__ = ()

    def load_scales(
        self, asm: Asm, base: Value, offset: Offset, head: Sequence[Value]
    ) -> tuple[list[Value], list[Value]]:
        loaded = [asm.load(base, asm.add(offset, at), vi8) for at in range(0, self.scale_bytes, 16)]
        scales = [asm.fmul(head[0], bytes_f32(asm, scale, signed=True)) for scale in loaded]
        return scales, self.offset_minima(asm, scales)


class _ScalePer16(_SignedScales):
    __slots__ = ()

    def pack_scales(self, asm: Asm, raw: RawBlocks, tile: int, base: Value, offset: Offset) -> None:
        for half in range(2):
            asm.store(self.read_scale(raw, 2 * tile + half), base, asm.add(offset, 16 * half))

    @abstractmethod
    def read_scale(self, raw: RawBlocks, n: int) -> Value:
        """The scale of the 16 weights from 16 n on, as 16 x i8."""


class _Q6K(_ScalePer16):
    """ql 128 (nibbles), qh 64 (2 bits), 16 x i8 scales, d f16."""

    __slots__ = ()

    def read_codes(self, raw: RawBlocks, tile: int) -> list[Value]:
        asm, (half, quarter) = raw.asm, divmod(tile, 4)
        words = []
        for v in range(8):
            low = masked(asm, raw.words(64 * half + 32 * (quarter % 2) + 4 * v), 4 * (quarter // 2), 15)
            high = masked(asm, raw.words(128 + 32 * half + 4 * v), 2 * quarter, 3)
            words.append(asm.builder.or_(low, asm.builder.shl(high, asm.splat_int(4))))
        return words

    def read_scale(self, raw: RawBlocks, n: int) -> Value:
        return raw.bytes(192 + n)


class _Q3K(_ScalePer16):
    """hmask 32 (bit 2), qs 64 (2 bits), 16 x 6-bit scales in 12 bytes, d f16."""

    __slots__ = ()

    def read_codes(self, raw: RawBlocks, tile: int) -> list[Value]:
        asm, (half, quarter) = raw.asm, divmod(tile, 4)
        words = []
        for v in range(8):
            low = masked(asm, raw.words(32 + 32 * half + 4 * v), 2 * quarter, 3)
            high = masked(asm, raw.words(4 * v), tile, 1)
            words.append(asm.builder.or_(low, asm.builder.shl(high, asm.splat_int(2))))
        return words

    def read_scale(self, raw: RawBlocks, n: int) -> Value:
        asm, (word, byte) = raw.asm, divmod(n, 4)
        low = masked(asm, raw.words(96 + 4 * (word % 2)), 4 * (word // 2), 15)
        high = masked(asm, raw.words(104), 2 * word, 3)
        scale = byte_of(asm, asm.builder.or_(low, asm.builder.shl(high, asm.splat_int(4))), byte)
        return asm.builder.sub(scale, asm.splat_int(32, i8))


class _IQ4XS(_SignedScales):
    """d f16, 8 x 2 high bits of scales u16, 8 x 4 low bits, 8 x 16 bytes of nibbles; one scale for 32 weights."""

    __slots__ = ()
    table = IQ4_CODES

    def read_codes(self, raw: RawBlocks, tile: int) -> list[Value]:
        return nibble_words(raw, 8 + 16 * tile)

    def pack_scales(self, asm: Asm, raw: RawBlocks, tile: int, base: Value, offset: Offset) -> None:
        b = asm.builder
        low = b.and_(b.lshr(raw.words(4), asm.splat_int(4 * tile)), asm.splat_int(15))
        high = b.and_(b.lshr(b.zext(raw.halves(2), vi32), asm.splat_int(2 * tile)), asm.splat_int(3))
        scale = b.sub(b.or_(low, b.shl(high, asm.splat_int(4))), asm.splat_int(32))
        asm.store(b.trunc(scale, vi8), base, offset)


class _Q2K(_Q4K):
    """16 x (4-bit scale, 4-bit minimum) in a byte each, qs 64 (2 bits), d, dmin f16."""

    __slots__ = ()

    def read_codes(self, raw: RawBlocks, tile: int) -> list[Value]:
        half, quarter = divmod(tile, 4)
        return [masked(raw.asm, raw.words(16 + 32 * half + 4 * v), 2 * quarter, 3) for v in range(8)]

    def pack_scales(self, asm: Asm, raw: RawBlocks, tile: int, base: Value, offset: Offset) -> None:
        for half in range(2):
            asm.store(raw.bytes(2 * tile + half), base, asm.add(offset, 16 * half))

    def load_scales(
        self, asm: Asm, base: Value, offset: Offset, head: Sequence[Value]
    ) -> tuple[list[Value], list[Value]]:
        b = asm.builder
        scales, minima = [], []
        for at in (0, 16):
            both = b.zext(asm.load(base, asm.add(offset, at), vi8), vi32)
            scales.append(asm.fmul(head[0], asm.to_f32(b.and_(both, asm.splat_int(15)))))
            minima.append(asm.fneg(asm.fmul(head[1], asm.to_f32(b.lshr(both, asm.splat_int(4))))))
        return scales, minima


FORMATS_256 = (
    _Q2K(GGMLType.Q2_K, stored_bits=2, scale_bytes=32, head_at=(80, 82)),
    _Q3K(GGMLType.Q3_K, stored_bits=3, scale_bytes=32, head_at=(108,), offset=4),
    _Q4K(GGMLType.Q4_K, stored_bits=4, scale_bytes=32, head_at=(0, 2)),
    _Q5K(GGMLType.Q5_K, stored_bits=5, scale_bytes=32, head_at=(0, 2)),
    _Q6K(GGMLType.Q6_K, stored_bits=6, scale_bytes=32, head_at=(208,), offset=32),
    _IQ4XS(GGMLType.IQ4_XS, stored_bits=4, scale_bytes=16, head_at=(0,), offset=128),
)
