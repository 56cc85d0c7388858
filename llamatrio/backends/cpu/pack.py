"""From GGUF rows to the packed form of formats.py, at load.

The packers are compiled kernels like the products, run without the GIL, and write straight to where the weights
will stay: there is no second copy, and threads can pack different rows of a matrix at once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llamatrio.backends.cpu.compile import compile_kernel, python_function
from llamatrio.backends.cpu.formats import ROWS, Format, RawBlocks
from llamatrio.backends.cpu.formats_32 import FORMATS_32
from llamatrio.backends.cpu.formats_256 import FORMATS_256
from llamatrio.backends.cpu.formats_float import FORMATS_FLOAT, FloatFormat
from llamatrio.backends.cpu.levels import Level
from llamatrio.backends.cpu.vector import Asm, Value
from llamatrio.errors import UnsupportedModelError
from llamatrio.model.ggml_type import GGMLType, block_shape

UInt8Array = NDArray[np.uint8]

FORMATS: dict[GGMLType, Format | FloatFormat] = {
    made.type: made for made in (*FORMATS_32, *FORMATS_256, *FORMATS_FLOAT)
}
"""Every type that the kernels know."""

Packing = GGMLType | Format
"""How rows are packed: as their type is, or in a form of its own."""


def format_of(packing: Packing) -> Format | FloatFormat:
    """What packs and unpacks."""
    return packing if isinstance(packing, Format) else FORMATS[packing]


def check_matrix(name: str, type: GGMLType, k: int) -> None:
    """Raises UnsupportedModelError, naming the tensor, where there is no kernel for rows of `k` weights of `type`."""
    if type not in FORMATS:
        raise UnsupportedModelError(f"tensor {name}: the CPU has no kernel for type {type.name}")
    n_weights = max(32, block_shape(type).n_weights)
    if k % n_weights:
        raise UnsupportedModelError(f"tensor {name}: expected rows of a multiple of {n_weights} weights, not {k}")


def group_bytes(packing: Packing, k: int) -> int:
    """Bytes of one packed group: 16 rows of `k` weights."""
    made = format_of(packing)
    if isinstance(made, FloatFormat):
        return k // 32 * made.tile_bytes
    return k // made.n_weights * made.block_bytes


def packed_bytes(packing: Packing, n_rows: int, k: int) -> int:
    """Bytes of a packed matrix; its rows are padded to whole groups of 16."""
    return -(-n_rows // ROWS) * group_bytes(packing, k)


def pack(
    packing: Packing,
    raw: UInt8Array,
    out: UInt8Array,
    *,
    first_group: int = 0,
    step: int = 1,
    level: Level | None = None,
) -> None:
    """Packs rows of a matrix into `out`; the rows that the last group lacks become zeros.

    Group i of these rows becomes group first_group + i * step of `out`. So a part of a matrix is packed with
    first_group = its first row / 16, and two matrices are interleaved by groups with step = 2.

    Args:
        raw: uint8 [n_rows, row_bytes], the rows as GGUF has them, each contiguous.
        out: uint8, one-dimensional and contiguous: the whole packed matrix.

    Raises:
        ValueError: a shape is wrong, or `out` is too small.
    """
    n_rows, row_bytes = raw.shape
    type = packing if isinstance(packing, GGMLType) else packing.type
    shape = block_shape(type)
    k = row_bytes // shape.n_bytes * shape.n_weights
    if type not in FORMATS or row_bytes % shape.n_bytes or k % 32:
        raise ValueError(f"expected rows of whole blocks of a known type, not {row_bytes} bytes of {type.name}")
    n_groups = -(-n_rows // ROWS)
    size = group_bytes(packing, k)
    if n_groups and out.size < (first_group + (n_groups - 1) * step + 1) * size:
        raise ValueError(f"expected room for the group {first_group + (n_groups - 1) * step}, not {out.size} bytes")
    if raw.strides[1] != 1 or not out.flags.c_contiguous or out.ndim != 1:
        raise ValueError("expected contiguous rows and a contiguous output")
    kernel = python_function(pack_kernel(packing, level), 6)
    whole = n_rows // ROWS
    target = out.ctypes.data + first_group * size
    kernel(raw.ctypes.data, target, raw.strides[0], k, whole, step * size)
    if whole < n_groups:
        padded = np.zeros((ROWS, row_bytes), np.uint8)
        padded[: n_rows % ROWS] = raw[whole * ROWS :]
        kernel(padded.ctypes.data, target + whole * step * size, row_bytes, k, 1, 0)


def pack_kernel(packing: Packing, level: Level | None = None) -> int:
    """Kernel (raw, out, raw_stride, k, n_groups, group_stride): packs groups of 16 rows; strides in bytes."""
    made = format_of(packing)
    n_weights, packed = (made.n_weights, made.block_bytes) if isinstance(made, Format) else (32, made.tile_bytes)
    raw_bytes = n_weights // block_shape(made.type).n_weights * block_shape(made.type).n_bytes

    def emit(
        asm: Asm, raw: Value, out: Value, raw_stride: Value, k: Value, n_groups: Value, group_stride: Value
    ) -> None:
        source, target = asm.pointer(raw), asm.pointer(out)

        def group(g: Value, _: list[Value]) -> list[Value]:
            group_at = asm.mul(g, asm.mul(raw_stride, ROWS))
            rows = [asm.at(source, asm.add(group_at, asm.mul(raw_stride, r))) for r in range(ROWS)]

            def block(i: Value, _: list[Value]) -> list[Value]:
                blocks = RawBlocks(asm, [asm.at(row, asm.mul(i, raw_bytes)) for row in rows])
                made.pack(asm, blocks, target, asm.add(asm.mul(g, group_stride), asm.mul(i, packed)))
                return []

            asm.loop(0, asm.builder.udiv(k, asm.int64(n_weights)), [], block)
            return []

        asm.loop(0, n_groups, [], group)

    return compile_kernel(f"pack_{made.name}", emit, level)
