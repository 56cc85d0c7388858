"""The types that the assembler works on."""

from __future__ import annotations

from typing import Any, Literal

from llvmlite import ir

Value = Any
"""An llvmlite ir.Value; llvmlite has no type hints."""
Offset = Any
"""A byte offset: a Python int or an i64 Value."""
Near = Literal["L1", "L2", "past"]
"""The cache that a line is asked into; past: used once, and no cache is to keep it."""

i1, i8, i16, i32, i64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
f16, f32 = ir.HalfType(), ir.FloatType()
pointer = ir.PointerType()

LANES = 16


def vec(element: Any, n: int = LANES) -> Any:
    """The vector type of `n` elements."""
    return ir.VectorType(element, n)


vf32, vi32, vf16, vi16, vi8 = vec(f32), vec(i32), vec(f16), vec(i16), vec(i8)
vbytes = vec(i8, 4 * LANES)


class BFloat(ir.Type):  # type: ignore[misc]  # llvmlite has no type hints
    """LLVM's bfloat, which llvmlite lacks; only ever a result that is bitcast at once."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


bfloat = BFloat()
