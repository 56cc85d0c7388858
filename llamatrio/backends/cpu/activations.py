"""How activations are laid out for the matrix products, and the emitters that write them.

All forms take blocks of 32 consecutive values of a row; k, the row's length, is a multiple of 32.

    q8    [m][k / 32] records of 64 bytes; row stride 2 k bytes. Read by the rows kernels of quantized types.
          bytes  0..31  int8: round(x / scale), ties to even, scale = max |x| / 127 (0 when all are 0)
                32..35  f32 scale
                36..39  f32 sum of the 32 integers
                40..43  f32 sum of the first 16 (formats with a scale per 16 weights need both halves)
                44..47  f32 sum of the last 16
                48..51  f32 length of the 32 integers as a vector, where a sketch is read (sketch.py)
                52..63  unused
    f32   [m][k] f32; row stride 4 k bytes. Read by the rows kernels of F32, F16 and BF16.
    bf16  [ceil(m / 16)][k / 32] tiles of 1,024 bytes: 16 rows x 32 bf16 (row r of the tile at 64 r), just as
          an AMX tile is loaded. Read by the panel kernels. The buffer must hold a multiple of 32 rows; what
          the rows past m contain does not matter.

    f16   as bf16, with halves instead. Read by the panel kernel of F16.

In q8, bf16 and f16 alike a block is 64 bytes. A q8 record is one cache line where the row starts on one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from llamatrio.backends.cpu.compile import Emit, compile_kernel
from llamatrio.backends.cpu.levels import Level
from llamatrio.backends.cpu.vector import Asm, Offset, Value, i8, vec, vf32

PanelForm = Literal["bf16", "f16"]

BLOCK = 32
"""Values in a block."""
BLOCK_BYTES = 64
"""Bytes of a block in the forms q8, bf16 and f16."""
SCALE, SUM, SUM_LOW, SUM_HIGH, LENGTH = 32, 36, 40, 44, 48
"""Where a q8 record keeps its f32."""


def q8_bytes(n_rows: int, k: int) -> int:
    """Bytes of `n_rows` rows in the form q8."""
    return n_rows * k // BLOCK * BLOCK_BYTES


def bf16_bytes(n_rows: int, k: int) -> int:
    """Bytes of `n_rows` rows in the form bf16, padded to 32 rows."""
    return -(-n_rows // 32) * 32 * k * 2


def q8_offset(asm: Asm, row: Value, block: Value, k: Value) -> Value:
    """Byte offset of block `block` of row `row` in the form q8; all i64."""
    return asm.add(asm.mul(row, asm.mul(k, 2)), asm.mul(block, BLOCK_BYTES))


def bf16_offset(asm: Asm, row: Value, block: Value, k: Value) -> Value:
    """Byte offset of block `block` of row `row` in the form bf16; all i64."""
    tile = asm.add(asm.mul(asm.div(row, 16), asm.div(k, BLOCK)), block)
    row_in_tile = asm.builder.and_(row, asm.int64(15))
    return asm.add(asm.mul(tile, 1024), asm.mul(row_in_tile, BLOCK_BYTES))


def emit_store_q8(asm: Asm, low: Value, high: Value, base: Value, offset: Offset) -> None:
    """Quantizes one block (values 0..15 and 16..31 as 16 x f32) into the record at base + offset."""
    largest = asm.reduce_max(asm.fmax(asm.fabs(low), asm.fabs(high)))
    is_zero = asm.builder.fcmp_ordered("==", largest, asm.float32(0.0))
    inverse = asm.select(is_zero, asm.float32(0.0), asm.fdiv(asm.float32(127.0), largest))
    sums = []
    for n, values in enumerate((low, high)):
        codes = asm.round_to_int(asm.fmul(values, asm.splat(inverse)))
        asm.store(asm.builder.trunc(codes, vec(i8)), base, asm.add(offset, 16 * n))
        sums.append(asm.to_f32(asm.reduce_add_int(codes)))
    asm.store(asm.fdiv(largest, asm.float32(127.0)), base, asm.add(offset, SCALE))
    asm.store(asm.fadd(*sums), base, asm.add(offset, SUM))
    asm.store(sums[0], base, asm.add(offset, SUM_LOW))
    asm.store(sums[1], base, asm.add(offset, SUM_HIGH))


def emit_store_bf16(asm: Asm, low: Value, high: Value, base: Value, offset: Offset) -> None:
    """Writes one block (values 0..15 and 16..31 as 16 x f32) as 32 bf16 at base + offset."""
    asm.store(asm.f32_to_bf16(low), base, offset)
    asm.store(asm.f32_to_bf16(high), base, asm.add(offset, 32))


def emit_store_f16(asm: Asm, low: Value, high: Value, base: Value, offset: Offset) -> None:
    """Writes one block (values 0..15 and 16..31 as 16 x f32) as 32 halves at base + offset."""
    asm.store_f16(low, base, offset)
    asm.store_f16(high, base, asm.add(offset, 32))


def quantize_rows_kernel(level: Level | None = None) -> int:
    """Kernel (x, out, m, k): f32 rows [m][k] at x into the form q8 at out."""

    def emit(asm: Asm, x: Value, out: Value, m: Value, k: Value) -> None:
        source, target = asm.pointer(x), asm.pointer(out)

        def block(i: Value, _: list[Value]) -> list[Value]:
            at = asm.mul(i, 4 * BLOCK)
            low, high = asm.load(source, at, vf32), asm.load(source, asm.add(at, 64), vf32)
            emit_store_q8(asm, low, high, target, asm.mul(i, BLOCK_BYTES))
            return []

        asm.loop(0, asm.mul(m, asm.div(k, BLOCK)), [], block)

    return compile_kernel("quantize_rows", emit, level)


def bf16_rows_kernel(level: Level | None = None) -> int:
    """Kernel (x, out, m, k): f32 rows [m][k] at x into the form bf16 at out."""
    return compile_kernel("bf16_rows", _emit_tiled_rows(emit_store_bf16), level)


def f16_rows_kernel(level: Level | None = None) -> int:
    """Kernel (x, out, m, k): f32 rows [m][k] at x into the form f16 at out."""
    return compile_kernel("f16_rows", _emit_tiled_rows(emit_store_f16), level)


def panel_rows_kernel(form: PanelForm, level: Level | None = None) -> int:
    """Kernel (x, out, m, k): f32 rows [m][k] at x into the form that panel kernels of this form read."""
    return bf16_rows_kernel(level) if form == "bf16" else f16_rows_kernel(level)


def _emit_tiled_rows(store_block: Callable[[Asm, Value, Value, Value, Offset], None]) -> Emit:
    def emit(asm: Asm, x: Value, out: Value, m: Value, k: Value) -> None:
        source, target = asm.pointer(x), asm.pointer(out)
        n_blocks = asm.div(k, BLOCK)

        def row(r: Value, _: list[Value]) -> list[Value]:
            def block(i: Value, _: list[Value]) -> list[Value]:
                at = asm.mul(asm.add(asm.mul(r, n_blocks), i), 4 * BLOCK)
                low, high = asm.load(source, at, vf32), asm.load(source, asm.add(at, 64), vf32)
                store_block(asm, low, high, target, bf16_offset(asm, r, i, k))
                return []

            asm.loop(0, n_blocks, [], block)
            return []

        asm.loop(0, m, [], row)

    return emit
