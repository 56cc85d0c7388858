"""Float instructions in f32, f64, f16, bf16 and pairs: exact rationals rounded once, and libm for approximations."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from .control import Control
from .opcode_table import Line, default_inputs, run_table

N = 128


class Format(NamedTuple):
    """A binary float format; values go through Python's floats, which hold all but f64 results exactly."""

    name: str
    bits: int
    mantissa: int
    exponent: int

    @property
    def dtype(self) -> str:
        return f"u{self.bits // 8}"

    @property
    def one_half_of(self) -> int:
        return 1 << (self.bits - 1)


F16, BF16 = Format("f16", 16, 10, 5), Format("bf16", 16, 7, 8)
F32, F64 = Format("f32", 32, 23, 8), Format("f64", 64, 52, 11)


def decode(bits: int, f: Format) -> float:
    sign = -1.0 if bits >> (f.bits - 1) else 1.0
    exponent = bits >> f.mantissa & (1 << f.exponent) - 1
    fraction = bits & (1 << f.mantissa) - 1
    bias = (1 << f.exponent - 1) - 1
    if exponent == (1 << f.exponent) - 1:
        return math.nan if fraction else sign * math.inf
    if exponent == 0:
        return sign * math.ldexp(fraction, 1 - bias - f.mantissa)
    return sign * math.ldexp(fraction | 1 << f.mantissa, exponent - bias - f.mantissa)


def encode(x: Fraction | float, f: Format, mode: str = "rn", negative_zero: bool = False) -> int:
    """Bits of a value rounded once: nearest even, toward zero, down or up."""
    bias = (1 << f.exponent - 1) - 1
    top = (1 << f.exponent) - 1 << f.mantissa
    if isinstance(x, float):
        if math.isnan(x):
            return top | 1 << f.mantissa - 1
        sign = int(math.copysign(1, x) < 0) << f.bits - 1
        if math.isinf(x):
            return sign | top
        if x == 0:
            return sign
        x = Fraction(x)
    if x == 0:
        return f.one_half_of if negative_zero else 0
    sign = f.one_half_of if x < 0 else 0
    magnitude = abs(x)
    exponent = max(math.frexp(magnitude)[1] - 1 if magnitude < 10**300 else magnitude.numerator.bit_length(), 1 - bias)
    while magnitude < Fraction(2) ** exponent and exponent > 1 - bias:
        exponent -= 1
    while magnitude >= Fraction(2) ** (exponent + 1):
        exponent += 1
    scaled = magnitude / Fraction(2) ** (exponent - f.mantissa)
    whole = scaled.numerator // scaled.denominator
    rest = scaled - whole
    up = {"rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole & 1), "rz": False,
          "rm": sign and rest, "rp": not sign and rest}[mode]  # fmt: skip
    whole += bool(up)
    subnormal = whole < 1 << f.mantissa
    bits = whole if subnormal else whole + (exponent + bias - 1 << f.mantissa)
    if bits >= top:
        overflow_to_finite = mode == "rz" or (mode == "rm" and not sign) or (mode == "rp" and sign)
        bits = top - 1 if overflow_to_finite else top
    return sign | bits


def exact(function: Callable[..., Any], f: Format, mode: str = "rn") -> Callable[..., Any]:
    """An operation on bits: exact on rationals, rounded once; what involves inf, NaN or zero goes through floats."""

    def result(*bits: int) -> int:
        x = [decode(b, f) for b in bits]
        if all(math.isfinite(v) for v in x):
            try:
                value = function(*(Fraction(v) for v in x))
            except ZeroDivisionError:
                value = None
            if value:
                return encode(value, f, mode)
        with np.errstate(all="ignore"):
            return encode(float(function(*(np.float64(v) for v in x))), f, mode)

    return result


def is_nan(bits: int, f: Format) -> bool:
    return math.isnan(decode(bits, f))


def pick(larger: bool, f: Format, propagate: bool = False) -> Callable[[int, int], int]:
    """min and max: a NaN loses (or, with .NaN, wins), and -0 is below +0."""

    def result(a: int, b: int) -> int:
        x, y = decode(a, f), decode(b, f)
        if math.isnan(x) or math.isnan(y):
            if propagate or (math.isnan(x) and math.isnan(y)):
                return encode(math.nan, f)
            return b if math.isnan(x) else a
        key = lambda v: (v, math.copysign(1, v))  # noqa: E731
        return (a if (key(x) > key(y)) == larger else b) if key(x) != key(y) else a

    return result


def pairwise(function: Callable[..., int]) -> Callable[..., int]:
    return lambda *x: function(*(v & 0xFFFF for v in x)) | function(*(v >> 16 for v in x)) << 16


def saturated(f: Format) -> Callable[..., int]:
    def result(*bits: int) -> int:
        total = exact(operator.add, f)(*bits)
        value = decode(total, f)
        return 0 if math.isnan(value) or value < 0 else encode(1.0, f) if value > 1 else total & f.one_half_of - 1

    return result


def fma(a: Any, b: Any, c: Any) -> Any:
    return a * b + c


FORMAT_OF: dict[str, Format] = {}


def line(
    text: str, expected: Callable[..., Any], f: Format, n: int, output: str | None = None, pair: bool = False
) -> Line:
    FORMAT_OF[text] = f
    dtype = "u4" if pair else f.dtype
    return Line(text, pairwise(expected) if pair else expected, (dtype,) * n, output or dtype)


def arithmetic() -> list[Line]:
    found = []
    for f in (F32, F64):
        d = f"rn.{f.name} $0, $1, $2"
        found += [
            line(f"add.{d};", exact(operator.add, f), f, 2),
            line(f"sub.{d};", exact(operator.sub, f), f, 2),
            line(f"mul.{d};", exact(operator.mul, f), f, 2),
            line(f"div.{d};", exact(operator.truediv, f), f, 2),
            line(f"fma.{d}, $3;", exact(fma, f), f, 3),
            line(f"rcp.rn.{f.name} $0, $1;", exact(lambda a: 1 / a, f), f, 1),
            line(f"min.{f.name} $0, $1, $2;", pick(False, f), f, 2),
            line(f"max.{f.name} $0, $1, $2;", pick(True, f), f, 2),
            line(f"neg.{f.name} $0, $1;", lambda a, f=f: a ^ f.one_half_of, f, 1),
            line(f"abs.{f.name} $0, $1;", lambda a, f=f: a & f.one_half_of - 1, f, 1),
            line(
                f"copysign.{f.name} $0, $1, $2;",
                lambda a, b, f=f: b & f.one_half_of - 1 | a & f.one_half_of,
                f,
                2,
            ),
        ]
    for mode in ("rz", "rm", "rp"):
        for name, function, n in (
            ("add", operator.add, 2),
            ("mul", operator.mul, 2),
            ("div", operator.truediv, 2),
            ("fma", fma, 3),
        ):
            operands = ", ".join(f"${k}" for k in range(n + 1))
            found.append(line(f"{name}.{mode}.f32 {operands};", exact(function, F32, mode), F32, n))
    found += [
        line("add.sat.f32 $0, $1, $2;", saturated(F32), F32, 2),
        line("max.NaN.f32 $0, $1, $2;", pick(True, F32, propagate=True), F32, 2),
        line("min.NaN.f32 $0, $1, $2;", pick(False, F32, propagate=True), F32, 2),
        line("add.rn.f16 $0, $1, $2;", exact(operator.add, F16), F16, 2),
        line("sub.rn.f16 $0, $1, $2;", exact(operator.sub, F16), F16, 2),
        line("mul.rn.f16 $0, $1, $2;", exact(operator.mul, F16), F16, 2),
        line("add.sat.f16 $0, $1, $2;", saturated(F16), F16, 2),
    ]
    for f in (F16, BF16):
        for pair in (False, True):
            suffix = f.name + ("x2" if pair else "")
            found += [
                line(f"fma.rn.{suffix} $0, $1, $2, $3;", exact(fma, f), f, 3, pair=pair),
                line(f"min.{suffix} $0, $1, $2;", pick(False, f), f, 2, pair=pair),
                line(f"max.NaN.{suffix} $0, $1, $2;", pick(True, f, propagate=True), f, 2, pair=pair),
                line(f"neg.{suffix} $0, $1;", lambda a, f=f: a ^ 0x8000, f, 1, pair=pair),
                line(f"abs.{suffix} $0, $1;", lambda a, f=f: a & 0x7FFF, f, 1, pair=pair),
            ]
    found += [
        line("add.rn.f16x2 $0, $1, $2;", exact(operator.add, F16), F16, 2, pair=True),
        line("mul.rn.f16x2 $0, $1, $2;", exact(operator.mul, F16), F16, 2, pair=True),
    ]
    return found


ORDERED: dict[str, Callable[[float, float], bool]] = {
    "eq": operator.eq, "ne": lambda x, y: x < y or x > y, "lt": operator.lt,
    "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip


def comparisons() -> list[Line]:
    def unordered(a: int, b: int) -> bool:
        return is_nan(a, F32) or is_nan(b, F32)

    found = []
    for name, test in ORDERED.items():
        compare = lambda a, b, t=test: t(decode(a, F32), decode(b, F32))  # noqa: E731
        found += [
            line(f"set.{name}.u32.f32 $0, $1, $2;", lambda a, b, c=compare: -int(c(a, b)), F32, 2),
            line(f"set.{name}u.f32.f32 $0, $1, $2;",
                 lambda a, b, c=compare: 0x3F800000 if c(a, b) or unordered(a, b) else 0, F32, 2),
            line(f"{{ .reg .pred p; setp.{name}.f32 p, $1, $2; selp.b32 $0, 1, 0, p; }}",
                 lambda a, b, c=compare: int(c(a, b)), F32, 2),
        ]  # fmt: skip
    found += [
        line("set.num.u32.f32 $0, $1, $2;", lambda a, b: -int(not unordered(a, b)), F32, 2),
        line("set.nan.u32.f32 $0, $1, $2;", lambda a, b: -int(unordered(a, b)), F32, 2),
        line("{ .reg .pred p; testp.infinite.f32 p, $1; selp.b32 $0, 1, 0, p; }",
             lambda a: int(math.isinf(decode(a, F32))), F32, 1),
        line("{ .reg .pred p; testp.notanumber.f32 p, $1; selp.b32 $0, 1, 0, p; }",
             lambda a: int(is_nan(a, F32)), F32, 1),
        line("{ .reg .pred p; setp.lt.f16 p, $1, $2; selp.b16 $0, 1, 0, p; }",
             lambda a, b: int(decode(a, F16) < decode(b, F16)), F16, 2),
    ]  # fmt: skip
    return found


EXACT_LINES = [*arithmetic(), *comparisons()]


@functools.cache
def inputs() -> dict[str, NDArray[Any]]:
    """Random bits hold few ordinary values: half of the lanes get numbers near one, and near each other."""
    found = default_inputs(N)
    rng = np.random.default_rng(5)
    for k in range(3):
        near = rng.normal(0, 2, N)
        f16 = near.astype(np.float16).view(np.uint16)
        found[f"u2_{k}"][1::2] = f16[1::2]
        found[f"u8_{k}"][1::2] = near.view(np.uint64)[1::2]
        single = near.astype(np.float32).view(np.uint32)
        found[f"u4_{k}"][1::4] = single[1::4]
        found[f"u4_{k}"][3::4] = (f16.astype(np.uint32) << 16 | f16[::-1])[3::4]
        found[f"u4_{k}"][:9] = [0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00000, 1, 0x007FFFFF, 0x7F7FFFFF, 0x3F800000]
        found[f"u4_{k}"][:9] = rng.permutation(found[f"u4_{k}"][:9])
    found["u4_1"][20:24] = found["u4_0"][20:24]
    return found


@functools.cache
def exact_results() -> NDArray[np.uint64]:
    return run_table(EXACT_LINES, inputs(), N)


def same(got: int, expected: int, text: str) -> bool:
    """Equal bits; any NaN equals any other, in each half of a pair."""
    if got == expected:
        return True
    f = FORMAT_OF[text]
    if "x2" in text:
        halves = [(got >> k & 0xFFFF, expected >> k & 0xFFFF) for k in (0, 16)]
        return all(a == b or (is_nan(a, f) and is_nan(b, f)) for a, b in halves)
    return is_nan(got, f) and is_nan(expected, f)


@pytest.mark.parametrize("row", range(len(EXACT_LINES)), ids=[each.id for each in EXACT_LINES])
def test_exact(emucuda: Control, row: int) -> None:
    each = EXACT_LINES[row]
    columns = [inputs()[f"{dtype}_{k}"] for k, dtype in enumerate(each.inputs)]
    mask = (1 << np.dtype(each.output).itemsize * 8) - 1
    for n, arguments in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        expected, got = each.expected(*arguments) & mask, int(exact_results()[row, n])
        assert same(got, expected, each.text), (
            f"{each.text} of {[hex(a) for a in arguments]}: {got:#x}, not {expected:#x}"
        )


# ---- approximations -------------------------------------------------------------------------------------------------
APPROXIMATE: dict[str, Callable[[Any], Any]] = {
    "ex2.approx.f32": np.exp2, "lg2.approx.f32": np.log2, "rcp.approx.f32": lambda x: 1 / x,
    "rsqrt.approx.f32": lambda x: 1 / np.sqrt(x), "sqrt.approx.f32": np.sqrt, "sqrt.rn.f32": np.sqrt,
    "sin.approx.f32": np.sin, "cos.approx.f32": np.cos, "tanh.approx.f32": np.tanh,
}  # fmt: skip


@functools.cache
def approximate_results() -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    x = np.concatenate([np.linspace(0.01, 9, 60), np.geomspace(1e-6, 1e6, 60)]).astype(np.float32)
    lines = [Line(f"{name} $0, $1;", int, ("u4",)) for name in APPROXIMATE]
    got = run_table(lines, {"u4_0": x.view(np.uint32)}, len(x))
    return x, got.astype(np.uint32).view(np.float32)


@pytest.mark.parametrize("row", range(len(APPROXIMATE)), ids=list(APPROXIMATE))
def test_approximate(emucuda: Control, row: int) -> None:
    x, got = approximate_results()
    with np.errstate(all="ignore"):
        expected = list(APPROXIMATE.values())[row](x.astype(np.float64)).astype(np.float32)
    assert np.allclose(got[row], expected, rtol=2e-6, atol=1e-6)


def test_half_approximations(emucuda: Control) -> None:
    x = np.linspace(-3, 3, 64).astype(np.float16)
    lines = [Line("tanh.approx.f16 $0, $1;", int, ("u2",), "u2"), Line("ex2.approx.f16 $0, $1;", int, ("u2",), "u2")]
    got = run_table(lines, {"u2_0": x.view(np.uint16)}, 64).astype(np.uint16).view(np.float16)
    assert np.allclose(got[0].astype(float), np.tanh(x.astype(float)), atol=1e-3)
    assert np.allclose(got[1].astype(float), np.exp2(x.astype(float)), rtol=1e-3)
