"""F32, F16 and BF16 weights in packed form.

As the quantized types (formats.py), 16 rows are interleaved; a tile of 16 rows x 32 k is

    F32    [32][16] f32: the weights of one k in a vector
    F16    [32][16] f16
    BF16   [16][16][2] bf16: pairs of k, which is how an AMX tile wants its second operand
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from llamatrio.backends.cpu.formats import ROWS, RawBlocks
from llamatrio.backends.cpu.vector import Asm, Offset, Value, vf32, vi16, vi32
from llamatrio.model.ggml_type import GGMLType, block_shape


@dataclass(frozen=True, slots=True)
class FloatFormat(ABC):
    """A type whose weights are plain numbers."""

    type: GGMLType

    @property
    def name(self) -> str:
        """Part of the names of its kernels."""
        return self.type.name.lower()

    @property
    def tile_bytes(self) -> int:
        return 32 * ROWS * block_shape(self.type).n_bytes

    def row_bytes(self, asm: Asm, k: Value) -> Value:
        """Bytes that `k` weights (an i64) of a group take."""
        return asm.mul(asm.div(k, 32), self.tile_bytes)

    @abstractmethod
    def pack(self, asm: Asm, raw: RawBlocks, base: Value, offset: Offset) -> None:
        """Packs 32 k of 16 rows to base + offset."""

    @abstractmethod
    def load_pair(self, asm: Asm, base: Value, offset: Offset, pair: int) -> tuple[Value, Value]:
        """The weights of k = 2 pair and 2 pair + 1 of the tile at base + offset, as 16 x f32 each."""


class _F32(FloatFormat):
    __slots__ = ()

    def pack(self, asm: Asm, raw: RawBlocks, base: Value, offset: Offset) -> None:
        def one(k: Value, _: list[Value]) -> list[Value]:
            asm.store(raw.words(asm.mul(k, 4)), base, asm.add(offset, asm.mul(k, 64)))
            return []

        asm.loop(0, 32, [], one)

    def load_pair(self, asm: Asm, base: Value, offset: Offset, pair: int) -> tuple[Value, Value]:
        at = asm.add(offset, 128 * pair)
        return asm.load(base, at, vf32), asm.load(base, asm.add(at, 64), vf32)


class _F16(FloatFormat):
    __slots__ = ()

    def pack(self, asm: Asm, raw: RawBlocks, base: Value, offset: Offset) -> None:
        b = asm.builder

        def one(pair: Value, _: list[Value]) -> list[Value]:
            word, at = raw.words(asm.mul(pair, 4)), asm.add(offset, asm.mul(pair, 64))
            asm.store(b.trunc(word, vi16), base, at)
            asm.store(b.trunc(b.lshr(word, asm.splat_int(16)), vi16), base, asm.add(at, 32))
            return []

        asm.loop(0, 16, [], one)

    def load_pair(self, asm: Asm, base: Value, offset: Offset, pair: int) -> tuple[Value, Value]:
        at = asm.add(offset, 64 * pair)
        return asm.load_f16(base, at), asm.load_f16(base, asm.add(at, 32))


class _BF16(FloatFormat):
    __slots__ = ()

    def pack(self, asm: Asm, raw: RawBlocks, base: Value, offset: Offset) -> None:
        def one(pair: Value, _: list[Value]) -> list[Value]:
            asm.store(raw.words(asm.mul(pair, 4)), base, asm.add(offset, asm.mul(pair, 64)))
            return []

        asm.loop(0, 16, [], one)

    def load_pair(self, asm: Asm, base: Value, offset: Offset, pair: int) -> tuple[Value, Value]:
        b = asm.builder
        both = asm.load(base, asm.add(offset, 64 * pair), vi32)
        even = b.shl(both, asm.splat_int(16))
        odd = b.and_(both, asm.splat_int(0xFFFF0000))
        return asm.bitcast(even, vf32), asm.bitcast(odd, vf32)


FORMATS_FLOAT = (_F32(GGMLType.F32), _F16(GGMLType.F16), _BF16(GGMLType.BF16))
