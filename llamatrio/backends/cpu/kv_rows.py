"""Rows of KV cells in memory, as the attention kernels find and read them.

row of a cell   f16:   f16 [n_head_kv][head_dim]
                q8_0:  bytes [n_head_kv][head_dim], then f16 scales [n_head_kv][head_dim / 32], padded

Where mixes_keys, K rows hold each block of 32 after ops.hadamard_blocks, and so do the queries that meet them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llvmlite import ir

from llamatrio.backends.cpu.activations import BLOCK
from llamatrio.backends.cpu.vector import LANES, Asm, Value, i8, i16, i32, i64, vec, vi32
from llamatrio.model.spec import KVType

CHUNK = 128
"""Positions whose scores are held at once; a multiple of 16."""
ADDRESS = 8
_LINE = 64
_LONGEST_ASKED_FOR = 256
"""Bytes of a row."""
_ROW_ALIGNMENT = 16
_SCALE_BYTES = 2


def row_bytes(kind: KVType, n_head_kv: int, head_dim: int) -> int:
    """Bytes of one cell's K (or V) row."""
    if kind == "f16":
        return 2 * n_head_kv * head_dim
    n_bytes = n_head_kv * head_dim + n_head_kv * head_dim // BLOCK * _SCALE_BYTES
    # Scales are read four bytes at a time, the last ones included.
    return -(-(n_bytes + _SCALE_BYTES) // _ROW_ALIGNMENT) * _ROW_ALIGNMENT


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What an attention kernel is compiled for."""

    head_dim: int
    n_head_kv: int
    n_heads: int
    """Query heads that share the loads: one of head_batches."""
    type_k: KVType
    type_v: KVType
    has_softcap: bool

    @property
    def name(self) -> str:
        """Identifies the kernel."""
        cap = "_cap" if self.has_softcap else ""
        return f"attend_{self.n_heads}x{self.head_dim}_{self.n_head_kv}_{self.type_k}_{self.type_v}{cap}"


class Rows:
    """The rows of one kv head in a pool, by place in the list of cells."""

    def __init__(self, a: Asm, shape: AttentionShape, kind: KVType, pool: Value, cells: Value, head: Value) -> None:
        self.a, self.kind, self.cells = a, kind, cells
        self.stride = row_bytes(kind, shape.n_head_kv, shape.head_dim)
        self.n_vectors = shape.head_dim // LANES
        self.n_blocks = shape.head_dim // BLOCK
        self.head_bytes = shape.head_dim * (2 if kind == "f16" else 1)
        self.base = a.at(pool, a.mul(head, self.head_bytes))
        self.scales = a.add(
            shape.n_head_kv * shape.head_dim, a.mul(head, self.n_blocks * _SCALE_BYTES - shape.head_dim)
        )
        """From the head's elements to its scales, in bytes."""
        self.found: Value | None = None

    def find_all(self, found: Value, n: Value) -> None:
        """From here on `row` looks into the list `found` (ADDRESS bytes [CHUNK]), which this fills for n rows.

        Places from n up to the next multiple of 16 have the last row.
        """
        a, half, kind = self.a, LANES // 2, vec(i64, LANES // 2)
        base = a.splat(a.builder.ptrtoint(self.base, i64), half)
        last = a.load(self.cells, a.mul(a.add(n, -1), 4), i32)

        def some(i: Value, _: list[Value]) -> list[Value]:
            cells = a.load_first(self.cells, a.mul(i, 4), a.builder.sub(n, i), last)
            for first in (0, half):
                wide = a.builder.zext(a.part(cells, first, half), kind)
                rows = a.builder.add(base, a.builder.mul(wide, ir.Constant(kind, [self.stride] * half)))
                a.store(rows, found, a.add(a.mul(i, ADDRESS), ADDRESS * first))
            return []

        a.loop(0, n, [], some, step=LANES)
        self.found = found

    def row(self, place: Value) -> Value:
        """Pointer to the head's elements in the row at `place`."""
        a = self.a
        if self.found is not None:
            return a.pointer(a.load(self.found, a.mul(place, ADDRESS), i64))
        cell = a.builder.zext(a.load(self.cells, a.mul(place, 4), i32), i64)
        return a.at(self.base, a.mul(cell, self.stride))

    def prefetch(self, place: Value) -> None:
        """Asks for the head's elements in the row at `place`."""
        row = self.row(place)
        for line in range(0, self.head_bytes, _LINE):
            self.a.prefetch(row, line)

    def fetch(self, place: Value, *, by_reading: bool) -> None:
        """Brings near what of the row at `place` lies behind the head's first element: for head 0 all of it."""
        row = self.row(place)
        lines = list(range(0, self.stride, _LINE))
        if self.stride - lines[-1] > _ROW_ALIGNMENT:
            lines.append(self.stride - _ROW_ALIGNMENT)  # rows need not begin with a line
        for line in lines:
            if by_reading:
                self.a.load_shared(row, line, i64)
            else:
                self.a.prefetch(row, line, "L1")

    def values(self, place: Value, *, bias: int) -> list[Value]:
        """All elements of the row at `place`, as vectors of 16 x f32; bias is what the stored integers have added."""
        return [self.value(place, d, bias=bias) for d in range(self.n_vectors)]

    def value(self, place: Value, d: int, *, bias: int) -> Value:
        """Elements 16 d .. 16 d + 15 of the row at `place`."""
        a = self.a
        row = self.row(place)
        if self.kind == "f16":
            return a.load_f16(row, 2 * LANES * d)
        stored = a.load(row, LANES * d, vec(i8))
        codes = a.builder.sub(a.builder.zext(stored, vi32), a.splat_int(bias)) if bias else a.builder.sext(stored, vi32)
        scale = a.f16_to_f32(a.splat(a.load(row, a.add(self.scales, _SCALE_BYTES * (d // 2)), i16)))
        return a.fmul(a.to_f32(codes), scale)

    def scales_of(self, places: Sequence[Value]) -> list[Value]:
        """The scales of 16 rows: per block 16 x f32."""
        a = self.a
        rows = [self.row(place) for place in places]
        scales: list[Value] = []
        for block in range(0, self.n_blocks, 2):
            # Two scales at a time; behind the last of a row there is room.
            pairs: Value = ir.Constant(vi32, ir.Undefined)
            for i, row in enumerate(rows):
                pair = a.load(row, a.add(self.scales, _SCALE_BYTES * block), i32)
                pairs = a.builder.insert_element(pairs, pair, a.int32(i))
            for bits in (pairs, a.builder.lshr(pairs, a.splat_int(16))):
                scales.append(a.f16_to_f32(a.builder.trunc(bits, vec(i16))))
        return scales[: self.n_blocks]


def fetcher(a: Asm, pools: Sequence[Rows], n: Value) -> Callable[[Value], None]:
    """What a loop over a chunk calls at cell i = 0, 16, ... to have n rows of each pool in cache at its end.

    Rows are scattered, so no hardware foresees them. Short ones are asked for a few at a time. Of long ones that would
    be more lines than a core can have under way: those are read, all at once, which the hardware takes for a stream.
    """
    is_short = max(rows.stride for rows in pools) <= _LONGEST_ASKED_FOR
    n_at_once = a.int64(CHUNK) if not is_short else a.builder.add(a.div(n, CHUNK // LANES), a.int64(1))

    def fetch(i: Value) -> None:
        first = a.mul(a.div(i, LANES), n_at_once)

        def one(rows: Rows) -> Callable[[Value, list[Value]], list[Value]]:
            def body(j: Value, _: list[Value]) -> list[Value]:
                rows.fetch(j, by_reading=not is_short)
                return []

            return body

        for rows in pools:
            a.loop(a.minimum(first, n), a.minimum(a.add(first, n_at_once), n), [], one(rows))

    return fetch
