"""The packed form of quantized weights, and for each type how it is packed and unpacked.

Theory of operation. 16 rows of W (a group) are interleaved, so that one 64-byte load holds 4 consecutive k of 16
rows: byte 4 r + c of vector v is the code of row r at k = 4 v + c. A product then broadcasts the 4 activation
bytes of one k-quad to all lanes, and no sum across lanes is ever needed. A *tile* is 16 rows x 32 k:

    codes    64 * stored_bits bytes. 4-bit fields: vector v (of 4) holds k-quad v low, v + 4 high.
             2-bit fields: vector p (of 2) holds quads 4 p .. 4 p + 3 from low to high. 1-bit field: quad v is bit v.
             A 5-bit code is a 4-bit field and a 1-bit field, a 6-bit code 4 + 2, a 3-bit code 2 + 1.
    scales   16 of each kind, one per row; what they are is the type's affair.

Types with blocks of 256 put a head (the f16 scales of 16 rows) before 8 tiles. A group is its tiles in order of k,
and a matrix its groups. Whatever the type, a weight is `scale * code + minimum` with an unsigned code of at most
8 bits: signed formats take `minimum = -offset * scale`.

Packing works on 16 rows at once as well: lane r holds a word of row r, so the bit fiddling is written once per type,
lane-wise, from the block layouts of ggml-common.h.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from llamatrio.backends.cpu.vector import Asm, Offset, Value, i8, i16, i32, vbytes, vec
from llamatrio.model.ggml_type import GGMLType, block_shape

ROWS = 16
"""Rows in a group."""


class Unpacked(NamedTuple):
    """A tile in registers: weight = scale * code + minimum."""

    codes: list[Value]
    """8 vectors of 64 bytes, one for each k-quad."""
    scales: list[Value]
    """16 x f32: one vector for all 32 k, or two for the halves of 16."""
    minima: list[Value]
    """As many as scales."""


class RawBlocks:
    """One GGUF block of each of 16 rows; the methods give lane r the field of row r."""

    def __init__(self, asm: Asm, rows: Sequence[Value]) -> None:
        self.asm = asm
        self.rows = rows

    def words(self, offset: Offset) -> Value:
        """The 4 bytes at `offset`, as 16 x i32."""
        return self._gather(offset, i32)

    def halves(self, offset: int) -> Value:
        """The 2 bytes at `offset`, as 16 x i16."""
        return self._gather(offset, i16)

    def bytes(self, offset: int) -> Value:
        """The byte at `offset`, as 16 x i8."""
        return self._gather(offset, i8)

    def _gather(self, offset: Offset, element: object) -> Value:
        lanes = self.asm.zero(vec(element))
        for n, row in enumerate(self.rows):
            lanes = self.asm.builder.insert_element(lanes, self.asm.load(row, offset, element), self.asm.int32(n))
        return lanes


@dataclass(frozen=True, slots=True)
class Format(ABC):
    """A quantized type in packed form, tile by tile."""

    type: GGMLType
    stored_bits: int
    """Bits of a stored code."""
    scale_bytes: int
    """Bytes of scales in a tile."""
    head_at: tuple[int, ...] = ()
    """Where a block of 256 keeps its f16 scales; the head is 16 of each."""
    offset: int = 0
    """What a signed format adds to its values to make unsigned codes of them."""

    table: ClassVar[Sequence[int] | None] = None
    """Codes by stored index, where the type has a table."""

    @property
    def name(self) -> str:
        """Part of the names of its kernels."""
        return self.type.name.lower()

    @property
    def code_bits(self) -> int:
        """Bits of a code as it enters the dot product."""
        return self.stored_bits if self.table is None else max(self.table).bit_length()

    @property
    def head_bytes(self) -> int:
        return 2 * ROWS * len(self.head_at)

    @property
    def tile_bytes(self) -> int:
        return 64 * self.stored_bits + self.scale_bytes

    @property
    def tile_stride(self) -> int:
        """From one tile of a block to the next."""
        return self.tile_bytes

    @property
    def n_weights(self) -> int:
        """Weights of a row in a block."""
        return block_shape(self.type).n_weights

    @property
    def n_tiles(self) -> int:
        """Tiles in a block."""
        return self.n_weights // 32

    @property
    def block_bytes(self) -> int:
        """Bytes of head and tiles: 16 GGUF blocks in packed form."""
        return self.head_bytes + self.n_tiles * self.tile_bytes

    def row_bytes(self, asm: Asm, k: Value) -> Value:
        """Bytes that `k` weights (an i64) of a group take."""
        return asm.mul(asm.div(k, 32 * self.n_tiles), self.block_bytes)

    def position(self, asm: Asm, offset: Value, index: Value) -> Value:
        """Bytes of a group before tile `index`, which is at `offset`, when it is read in order."""
        return offset

    @abstractmethod
    def pack(self, asm: Asm, raw: RawBlocks, base: Value, offset: Offset) -> None:
        """Packs n_weights of 16 rows to base + offset."""

    @abstractmethod
    def unpack(self, asm: Asm, base: Value, offset: Offset, head: Sequence[Value]) -> Unpacked:
        """Loads the tile at base + offset."""

    def load_head(self, asm: Asm, base: Value, offset: Offset) -> list[Value]:
        """The head at base + offset, as 16 x f32 each."""
        return [asm.load_f16(base, asm.add(offset, 2 * ROWS * n)) for n in range(len(self.head_at))]

    def offset_minima(self, asm: Asm, scales: Sequence[Value]) -> list[Value]:
        """The minima of a signed format."""
        return [asm.fmul(scale, asm.splat_f32(-self.offset)) for scale in scales]


class Interleaved(Format):
    """A type that is packed as the module says. Subclasses say where codes and scales come from."""

    __slots__ = ()

    @abstractmethod
    def read_codes(self, raw: RawBlocks, tile: int) -> list[Value]:
        """The stored codes of tile `tile` of the block: 8 times 16 x i32, byte c of word v being k = 4 v + c."""

    @abstractmethod
    def pack_scales(self, asm: Asm, raw: RawBlocks, tile: int, base: Value, offset: Offset) -> None:
        """Writes the tile's scales at base + offset."""

    @abstractmethod
    def load_scales(
        self, asm: Asm, base: Value, offset: Offset, head: Sequence[Value]
    ) -> tuple[list[Value], list[Value]]:
        """Scales and minima of the tile whose scales are at base + offset."""

    def pack(self, asm: Asm, raw: RawBlocks, base: Value, offset: Offset) -> None:
        for n, at in enumerate(self.head_at):
            asm.store(raw.halves(at), base, asm.add(offset, 2 * ROWS * n))
        for tile in range(self.n_tiles):
            at = asm.add(offset, self.head_bytes + tile * self.tile_bytes)
            _store_codes(asm, self.read_codes(raw, tile), self.stored_bits, base, at)
            self.pack_scales(asm, raw, tile, base, asm.add(at, 64 * self.stored_bits))

    def unpack(self, asm: Asm, base: Value, offset: Offset, head: Sequence[Value]) -> Unpacked:
        codes = _load_codes(asm, self.stored_bits, base, offset)
        if self.table is not None:
            codes = [asm.lookup16(self.table, code) for code in codes]
        scales, minima = self.load_scales(asm, base, asm.add(offset, 64 * self.stored_bits), head)
        return Unpacked(codes, scales, minima)


def _store_codes(asm: Asm, words: list[Value], bits: int, base: Value, offset: Offset) -> None:
    """Splits codes into the fields of the module's table and stores them."""
    b = asm.builder

    def field(word: Value, shift: int, mask: int) -> Value:
        return b.and_(b.lshr(word, asm.splat_int(shift)), asm.splat_int(mask * 0x01010101))

    def merged(parts: list[Value], width: int) -> Value:
        total = parts[0]
        for n, part in enumerate(parts[1:], start=1):
            total = b.or_(total, b.shl(part, asm.splat_int(n * width)))
        return total

    vectors: list[Value] = []
    shift = 0
    if bits == 8:
        vectors = words
    if bits in (4, 5, 6):
        low = [field(word, 0, 15) for word in words]
        vectors += [merged([low[v], low[v + 4]], 4) for v in range(4)]
        shift = 4
    if bits in (2, 3, 6):
        crumbs = [field(word, shift, 3) for word in words]
        vectors += [merged(crumbs[4 * p : 4 * p + 4], 2) for p in range(2)]
        shift += 2
    if bits in (3, 5):
        vectors.append(merged([field(word, shift, 1) for word in words], 1))
    for n, vector in enumerate(vectors):
        asm.store(vector, base, asm.add(offset, 64 * n))


def _load_codes(asm: Asm, bits: int, base: Value, offset: Offset) -> list[Value]:
    """The inverse of _store_codes, into 8 vectors of 64 bytes."""
    vectors = [asm.load(base, asm.add(offset, 64 * n), vbytes) for n in range(bits)]
    if bits == 8:
        return vectors
    codes: list[Value] = []
    shift = 0
    if bits in (4, 5, 6):
        codes = [asm.bytes_and(v, 15) for v in vectors[:4]] + [asm.bytes_shift(v, 4, 15) for v in vectors[:4]]
        vectors, shift = vectors[4:], 4
    if bits in (2, 3, 6):
        crumbs = [asm.bytes_shift(vectors[v // 4], 2 * (v % 4) - shift, 3 << shift) for v in range(8)]
        codes = _joined(asm, codes, crumbs)
        vectors, shift = vectors[2:], shift + 2
    if bits in (3, 5):
        codes = _joined(asm, codes, [asm.bytes_shift(vectors[0], v - shift, 1 << shift) for v in range(8)])
    return codes


def _joined(asm: Asm, codes: list[Value], fields: list[Value]) -> list[Value]:
    return [asm.builder.or_(code, field) for code, field in zip(codes, fields, strict=True)] if codes else fields
