"""mma, ldmatrix and movmatrix.

The shapes that the runtime knows are those whose fragments follow one rule: see driver/tensor_ops.cpp.
"""

from __future__ import annotations

import re

from ..emitter import Emitter, NoRule, types_in
from ..parser import Instruction, Vector
from ..types import B32, Type
from .memory import check
from .registry import rule

_TYPES = {"f16": "kF16", "bf16": "kBf16", "tf32": "kTf32", "s8": "kS8", "u8": "kU8"}
_SHAPE = re.compile(r"m(8|16)n8k(\d+)")


def _vector(operand: object) -> tuple[str, ...]:
    if isinstance(operand, str):
        return (operand,)
    if not isinstance(operand, Vector):
        raise NoRule(f"operand {operand} where a vector is expected")
    return operand.items


@rule("ldmatrix")
def load_matrices(e: Emitter, i: Instruction) -> None:
    if "m8n8" not in i.parts or "b16" not in i.parts:
        raise NoRule("this shape of ldmatrix")
    targets = _vector(i.operands[0])
    n = len(targets)
    e.emit(f"{{ char* a_ = {e.memory(i.operands[1], 'shared')};")
    e.emit(f"if (t->lane < {8 * n}) {{")
    check(e, "a_", 16, "kRead", "shared")
    e.emit(f"CHECK_ALIGNED(a_, 16, {e.site}); }}")
    transposed = "true" if "trans" in i.parts else "false"
    e.emit(f"const uint32_t* o_ = ldmatrix(t, a_, {n}, {transposed}, {e.site});")
    e.emit(f"uint32_t r_[{n}]; memcpy(r_, o_, {4 * n});")
    for k, target in enumerate(targets):
        e.set(target, f"r_[{k}]")
    e.emit("}")


@rule("movmatrix")
def transpose(e: Emitter, i: Instruction) -> None:
    e.emit(f"t->slot->in[0] = {e.bits(i.operands[1], B32)}; t->rt->warp(t, kMovMatrix, ~0u, {e.site});")
    e.set(i.operands[0], "t->slot->out[0]")


def _check_shape(m: int, k: int, a: Type, a_name: str, n_a: int, n_b: int) -> None:
    """The registers that the fragment rule implies must be those that the instruction has."""
    elements = 1 if a_name == "tf32" else 32 // a.bits
    if n_b != k // (4 * elements) or n_a != n_b * (m // 8):
        raise NoRule("fragments of this mma shape")


@rule("mma")
def multiply_matrices(e: Emitter, i: Instruction) -> None:
    shape = next((match for part in i.parts if (match := _SHAPE.fullmatch(part))), None)
    d_name, a_name, b_name, c_name = i.parts[-4:]
    if not shape or a_name not in _TYPES or b_name not in _TYPES or i.parts[4:6] != ["row", "col"]:
        raise NoRule("this form of mma")
    if d_name != c_name or d_name not in ("f16", "f32", "s32") or "satfinite" in i.parts:
        raise NoRule("this form of mma")
    m, k = int(shape[1]), int(shape[2])
    d, a, b, c = (_vector(o) for o in i.operands)
    _check_shape(m, k, types_in(i)[-3], a_name, len(a), len(b))
    stores = "; ".join(f"t->slot->in[{n}] = {e.bits(x, B32)}" for n, x in enumerate((*a, *b, *c)))
    half = 1 if d_name == "f16" else 0
    e.emit(f"{{ {stores};")
    e.emit(f"const uint32_t* o_ = mma(t, MmaShape{{{m}, {k}, {_TYPES[a_name]}, {_TYPES[b_name]}, {half}}}, {e.site});")
    e.emit(f"uint32_t r_[{len(d)}]; memcpy(r_, o_, {4 * len(d)});")
    for n, target in enumerate(d):
        e.set(target, f"r_[{n}]")
    e.emit("}")
