"""A small macro assembler over LLVM IR: what the CPU kernels are written in.

Plain Numba loops do not become `vpdpbusd` or AMX tiles; explicit vector code does. Rules:

1. The vector is always 16 lanes of 32 bits (64 bytes). LLVM splits it where registers are narrower, so a kernel
   is written once and every level runs the same operations in the same order.
2. An address is a pointer and a byte offset (an int, or an i64 value). Alignment is 1 unless stated: x86 and ARM
   load unaligned vectors at the same speed, and a wrong promise is a crash.
3. Floating-point operations are never reassociated. The result of a kernel is defined by its text, which is
   what makes a row's result independent of the rows around it.
4. What differs between levels (fused multiply-add, f16, dot products, byte shuffles) is a method here and
   nowhere else.

The arguments of a method are llvmlite values unless they are said to be Python ints or floats.
"""

from __future__ import annotations

from llamatrio.backends.cpu.vector_bytes import ByteOps
from llamatrio.backends.cpu.vector_float import FloatOps
from llamatrio.backends.cpu.vector_tiles import TileOps
from llamatrio.backends.cpu.vector_types import (
    LANES,
    Near,
    Offset,
    Value,
    f16,
    f32,
    i1,
    i8,
    i16,
    i32,
    i64,
    pointer,
    vbytes,
    vec,
    vf16,
    vf32,
    vi8,
    vi16,
    vi32,
)

__all__ = [
    "LANES",
    "Asm",
    "Near",
    "Offset",
    "Value",
    "f16",
    "f32",
    "i1",
    "i8",
    "i16",
    "i32",
    "i64",
    "pointer",
    "vbytes",
    "vec",
    "vf16",
    "vf32",
    "vi8",
    "vi16",
    "vi32",
]


class Asm(FloatOps, ByteOps, TileOps):
    """Appends operations to one function under construction.

    Constants, memory, control flow and lanes: vector_core. f32, f16, bf16: vector_float. Bytes and integer dot
    products: vector_bytes. AMX tiles: vector_tiles.
    """
