"""Float arithmetic in f16, bf16, f32, f64 and packed pairs, comparisons, and the approximate functions.

An approximate instruction is computed as well as libm can: no result is worse than the device's.
"""

from __future__ import annotations

from ..emitter import Emitter, NoRule, part_in, types_in
from ..parser import Instruction, Operand, Pair
from ..types import PRED, Type
from .registry import rule

_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_FUNCTIONS = {
    "ex2": "std::exp2", "lg2": "std::log2", "rcp": "1 / ", "rsqrt": "1 / std::sqrt", "sqrt": "std::sqrt",
    "sin": "std::sin", "cos": "std::cos", "tanh": "std::tanh",
}  # fmt: skip
_DIRECTED = ("rz", "rm", "rp")
_ROUNDED_BY = {"rz": "kZero", "rm": "kDown", "rp": "kUp"}


def lanewise(e: Emitter, d: Operand, ty: Type, sources: list[Operand], result: object) -> None:
    """Sets d to result(values) for a scalar, or for both halves of a packed pair."""
    assert callable(result)
    if ty.lanes == 1:
        return e.set_value(d, ty, result([e.value(s, ty) for s in sources]))
    halves = []
    for shift in (0, 16):
        values = [e.float_of(f"(uint16_t)({e.bits(s, ty)} >> {shift})", ty.lane) for s in sources]
        halves.append(e.to_bits(ty.lane, result(values)))
    e.set(d, f"(uint32_t){halves[0]} | (uint32_t){halves[1]} << 16")


def arithmetic(e: Emitter, i: Instruction, ty: Type) -> None:
    """add, sub, mul, div, min, max, fma, mad."""
    d, *sources = i.operands
    if part_in(i, _DIRECTED):
        return directed(e, i, ty)

    def result(values: list[str]) -> str:
        value = _arithmetic_value(i, ty, values)
        if "sat" in i.parts:
            value = f"saturate<{ty.value}>({value})"
        if "relu" in i.parts:
            value = f"max_nan<{ty.value}>({value}, 0)"
        return value

    lanewise(e, d, ty, sources, result)


def _arithmetic_value(i: Instruction, ty: Type, values: list[str]) -> str:
    name = i.parts[0]
    if name in _INFIX:
        return f"({ty.value})({values[0]} {_INFIX[name]} {values[1]})"
    if name in ("fma", "mad"):
        function = "fma_half" if ty.is_half else "std::fma"
        return f"{function}({', '.join(values)})"
    if "xorsign" in i.parts:
        raise NoRule("min and max with xorsign")
    suffix = "nan" if "NaN" in i.parts else "num"
    nested = f"{name}_{suffix}<{ty.value}>({values[0]}, {values[1]})"
    return f"{name}_{suffix}<{ty.value}>({nested}, {values[2]})" if len(values) > 2 else nested


def directed(e: Emitter, i: Instruction, ty: Type) -> None:
    """f32 only: through an exact sum in f64."""
    if ty != Type("f", 32):
        raise NoRule("directed rounding of anything but f32")
    d, *sources = i.operands
    name = "fma" if i.parts[0] == "mad" else i.parts[0]
    mode = _ROUNDED_BY[part_in(i, _DIRECTED) or ""]
    e.set(d, f"f32_directed(exact_{name}({', '.join(e.value(s, ty) for s in sources)}), {mode})")


@rule("fma")
def fused(e: Emitter, i: Instruction) -> None:
    (ty,) = types_in(i)
    arithmetic(e, i, ty)


def change_sign(e: Emitter, d: Operand, a: Operand, ty: Type, operator: str, which: str) -> None:
    """neg and abs work on the sign bit alone, so that NaNs pass."""
    sign = {16: 0x8000, 32: 0x80000000, 64: 1 << 63}[ty.bits]
    if ty.lanes == 2:
        sign = 0x80008000
    mask = sign if which == "sign" else sign ^ ((1 << ty.bits) - 1)
    e.set(d, f"({ty.storage})({e.bits(a, ty)} {operator} {mask}ull)")


@rule("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh")
def function(e: Emitter, i: Instruction) -> None:
    (ty,) = types_in(i)
    if part_in(i, _DIRECTED):
        raise NoRule("directed rounding")
    name = _FUNCTIONS[i.parts[0]]
    lanewise(e, i.operands[0], ty, i.operands[1:], lambda values: f"{name}({values[0]})")


@rule("copysign")
def copy_sign(e: Emitter, i: Instruction) -> None:
    (ty,) = types_in(i)
    d, sign, magnitude = i.operands
    e.set_value(d, ty, f"std::copysign({e.value(magnitude, ty)}, {e.value(sign, ty)})")


@rule("testp")
def test_property(e: Emitter, i: Instruction) -> None:
    (ty,) = types_in(i)
    x = e.value(i.operands[1], ty)
    tests = {
        "finite": f"std::isfinite({x})", "infinite": f"std::isinf({x})", "notanumber": f"std::isnan({x})",
        "number": f"!std::isnan({x})", "normal": f"std::isnormal({x})",
        "subnormal": f"std::fpclassify({x}) == FP_SUBNORMAL",
    }  # fmt: skip
    e.set(i.operands[0], tests[i.parts[1]])


# ---- comparisons ------------------------------------------------------------------------------------------------
_ORDERED = {
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "lo": "<", "ls": "<=", "hi": ">", "hs": ">=",
}  # fmt: skip
_COMBINE = {"and": "&&", "or": "||", "xor": "!="}


def comparison(test: str, x: str, y: str, ty: Type) -> str:
    unordered = f"(std::isnan({x}) || std::isnan({y}))"
    if not ty.is_float:
        return f"({x} {_ORDERED[test]} {y})"
    if test == "num":
        return f"!{unordered}"
    if test == "nan":
        return unordered
    if test == "ne":
        return f"({x} < {y} || {x} > {y})"
    if test in _ORDERED:
        return f"({x} {_ORDERED[test]} {y})"
    return f"({unordered} || {x} {_ORDERED[test[:2]]} {y})"  # equ, neu, ltu, ...


def _combined(e: Emitter, i: Instruction, test: str, sources: list[Operand]) -> str:
    name = part_in(i, _COMBINE)
    return f"({test} {_COMBINE[name]} {e.bits(sources[2], PRED)})" if name else test


@rule("setp")
def compare(e: Emitter, i: Instruction) -> None:
    *_, ty = types_in(i)
    d, *sources = i.operands
    targets = [d.first, d.second] if isinstance(d, Pair) else [d]
    if ty.lanes == 2:
        tests = []
        for shift in (0, 16):
            x, y = (e.float_of(f"(uint16_t)({e.bits(s, ty)} >> {shift})", ty.lane) for s in sources[:2])
            tests.append(comparison(i.parts[1], x, y, ty))
    else:
        test = comparison(i.parts[1], e.value(sources[0], ty), e.value(sources[1], ty), ty)
        tests = [test, f"!{test}"]
    temporaries = [f"p{k}_" for k in range(len(targets))]  # a target may be the predicate that is combined
    results = [_combined(e, i, test, sources) for test in tests]
    e.emit("{ " + " ".join(f"bool {t} = {r};" for t, r in zip(temporaries, results, strict=False)))
    for target, temporary in zip(targets, temporaries, strict=True):
        e.set(target, temporary)
    e.emit("}")


@rule("set")
def compare_to_number(e: Emitter, i: Instruction) -> None:
    result, ty = types_in(i)
    d, *sources = i.operands
    one = {"f": "0x3f800000u", "u": "0xffffffffu", "s": "0xffffffffu", "b": "0xffffffffu"}
    if ty.lanes == 1 and result.lanes == 1:
        yes = {("f", 16): "0x3c00", ("bf", 16): "0x3f80", ("u", 16): "0xffff", ("s", 16): "0xffff"}.get(
            (result.kind, result.bits), one.get(result.kind, "")
        )
        test = comparison(i.parts[1], e.value(sources[0], ty), e.value(sources[1], ty), ty)
        return e.set(d, f"{_combined(e, i, test, sources)} ? {yes} : 0")
    unit = "0x3c00" if result.kind == "f" else "0x3f80" if result.kind == "bf" else "0xffff"
    halves = []
    for shift in (0, 16):
        x, y = (e.float_of(f"(uint16_t)({e.bits(s, ty)} >> {shift})", ty.lane) for s in sources[:2])
        halves.append(f"({_combined(e, i, comparison(i.parts[1], x, y, ty), sources)} ? {unit}u << {shift} : 0)")
    e.set(d, " | ".join(halves))
