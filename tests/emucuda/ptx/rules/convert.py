"""cvt in all its forms, and mov with its packing."""

from __future__ import annotations

from ..emitter import Emitter, NoRule, part_in, types_in
from ..parser import Instruction, Vector
from ..types import ROUNDINGS, U32, Type
from .registry import rule

_TO_INTEGER = {"rni": "i", "rzi": "z", "rmi": "m", "rpi": "p"}


def rounded_bits(ty: Type, value: str, rounding: str) -> str:
    """A double (or float) rounded to a float format, as bits."""
    if ty.kind == "tf":
        return f"tf32_bits((float)({value}))"
    if ty.bits == 64:
        return f"bits_of((double)({value}))"
    name = {("f", 16): "f16", ("bf", 16): "bf16", ("f", 32): "f32"}[ty.kind, ty.bits]
    if rounding == "kNearest" and ty.bits == 32:
        return f"bits_of((float)({value}))"
    return f"{name}_rounded({value}, {rounding})"


def _from_float(e: Emitter, i: Instruction, to: Type, source: Type) -> None:
    x = e.value(i.operands[1], source)
    integral = part_in(i, _TO_INTEGER)
    if integral:
        x = f"int_rounded({x}, '{_TO_INTEGER[integral]}')"
    if not to.is_float:
        if not integral:
            raise NoRule("a conversion to integer without rounding")
        return e.set(i.operands[0], _widened(e, i, to, f"({to.storage})to_int<{to.value}>({x})"))
    if "relu" in i.parts:
        x = f"max_nan<double>({x}, 0)"
    if "sat" in i.parts:
        x = f"saturate<double>({x})"
    e.set(i.operands[0], rounded_bits(to, x, ROUNDINGS[part_in(i, ROUNDINGS) or "rn"]))


def _from_integer(e: Emitter, i: Instruction, to: Type, source: Type) -> None:
    x = e.value(i.operands[1], source)
    if to.is_float:
        rounding = ROUNDINGS[part_in(i, ROUNDINGS) or "rn"]
        if to.bits == 64:
            return e.set(i.operands[0], f"f64_from_int<{source.value}>({x}, {rounding})")
        value = f"odd_double<{source.value}>({x})" if source.bits == 64 else f"(double){x}"
        return e.set(i.operands[0], rounded_bits(to, value, rounding))
    if "sat" in i.parts:
        x = f"saturate_int<{to.value}, {source.value}>({x})"
    e.set(i.operands[0], _widened(e, i, to, f"({to.storage}){x}"))


def _widened(e: Emitter, i: Instruction, to: Type, bits: str) -> str:
    """A register wider than the result takes it extended by its sign."""
    target = i.operands[0]
    known = e.widths.get(target) if isinstance(target, str) else None
    if known and known.bits > to.bits and to.is_signed:
        return f"({known.storage})(int64_t)({to.value}){bits}"
    return bits


def _pair(e: Emitter, i: Instruction, to: Type) -> None:
    """cvt.rn.f16x2.f32 d, high, low."""
    rounding = ROUNDINGS[part_in(i, ROUNDINGS) or "rn"]
    halves = []
    for operand in i.operands[1:]:
        x = e.value(operand, Type("f", 32))
        x = f"max_nan<double>({x}, 0)" if "relu" in i.parts else x
        halves.append(rounded_bits(to.lane, x, rounding))
    e.set(i.operands[0], f"(uint32_t){halves[0]} << 16 | {halves[1]}")


def _pack(e: Emitter, i: Instruction) -> None:
    """cvt.pack.sat.s8.s32.b32 d, a, b, c: c << 2 w | a << w | b with a and b saturated to w bits."""
    to, source, *_ = types_in(i)
    d, a, b, *c = i.operands
    high, low = (
        f"(uint32_t)({Type('u', to.bits).storage})saturate_int<{to.value}, int32_t>({e.value(x, source)})"
        for x in (a, b)
    )
    rest = f"{e.bits(c[0], U32)} << {2 * to.bits} | " if c else ""
    e.set(d, f"{rest}{high} << {to.bits} | {low}")


@rule("cvt")
def convert(e: Emitter, i: Instruction) -> None:
    if "pack" in i.parts:
        return _pack(e, i)
    to, source = types_in(i)
    if to.lanes == 2:
        return _pair(e, i, to)
    if source.is_float:
        return _from_float(e, i, to, source)
    _from_integer(e, i, to, source)


@rule("mov")
def move(e: Emitter, i: Instruction) -> None:
    (ty,) = types_in(i)
    d, a = i.operands
    if isinstance(d, Vector):
        width = ty.bits // len(d.items)
        e.emit(f"{{ {ty.storage} v_ = {e.bits(a, ty)};")
        for k, item in enumerate(d.items):
            e.set(item, f"(uint{width}_t)(v_ >> {k * width})")
        return e.emit("}")
    if isinstance(a, Vector):
        width = ty.bits // len(a.items)
        part = Type("b", width)
        joined = " | ".join(f"({ty.storage}){e.bits(item, part)} << {k * width}" for k, item in enumerate(a.items))
        return e.set(d, f"({ty.storage})({joined})")
    e.set(d, e.bits(a, ty))
