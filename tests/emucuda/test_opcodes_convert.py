"""cvt between every pair of types, with each rounding, and saturation; the packed forms."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from .control import Control
from .opcode_table import Line, default_inputs, run_table
from .test_opcodes_float import BF16, F16, F32, F64, Format, decode, encode
from .test_opcodes_integer import clamp, s

N = 128
MODES = ("rn", "rz", "rm", "rp")
INTEGERS = [(f"{sign}{bits}", sign == "s", bits) for sign in "us" for bits in (8, 16, 32, 64)]


def integral(x: float, mode: str) -> float:
    return {
        "rni": float(round(Fraction(x))),
        "rzi": float(math.trunc(x)),
        "rmi": float(math.floor(x)),
        "rpi": float(math.ceil(x)),
    }[mode]


def bounds(signed: bool, bits: int) -> tuple[int, int]:
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)


def float_to_int(f: Format, mode: str, signed: bool, bits: int) -> Callable[[int], int]:
    """NaN gives 0 (in 64 bits the smallest value when signed), and what is out of range the nearest end of it."""
    low, high = bounds(signed, bits)

    def result(b: int) -> int:
        x = decode(b, f)
        if math.isnan(x):
            return low if bits == 64 else 0
        if math.isinf(x):
            return high if x > 0 else low
        return clamp(int(integral(x, mode)), low, high)

    return result


def storage(bits: int) -> str:
    return f"u{max(bits // 8, 2)}"


def read_int(b: int, signed: bool, bits: int) -> int:
    b &= (1 << bits) - 1
    return s(b, bits) if signed else b


def resized(signed: bool, bits: int, to_signed: bool, to_bits: int) -> Callable[[int], int]:
    """A 16-bit register holds an 8-bit result extended by its sign."""
    return lambda b: read_int(read_int(b, signed, bits), to_signed, to_bits)


def saturated_int(signed: bool, bits: int, to_signed: bool, to_bits: int) -> Callable[[int], int]:
    return lambda b: clamp(read_int(b, signed, bits), *bounds(to_signed, to_bits))


def int_to_int() -> list[Line]:
    found = []
    for to, to_signed, to_bits in INTEGERS:
        for source, signed, bits in INTEGERS:
            if to == source:
                continue
            pair = (signed, bits, to_signed, to_bits)
            out = storage(to_bits)
            found.append(Line(f"cvt.{to}.{source} $0, $1;", resized(*pair), (storage(bits),), out))
            (low, high), (to_low, to_high) = bounds(signed, bits), bounds(to_signed, to_bits)
            if low < to_low or high > to_high:  # otherwise ptxas refuses .sat
                found.append(Line(f"cvt.sat.{to}.{source} $0, $1;", saturated_int(*pair), (storage(bits),), out))
    return found


def int_to_float(f: Format, mode: str, signed: bool, bits: int) -> Callable[[int], int]:
    return lambda b: encode(Fraction(read_int(b, signed, bits)), f, mode)


def rounded_to_integer(mode: str) -> Callable[[int], int]:
    def result(b: int) -> int:
        x = decode(b, F32)
        return encode(integral(x, mode) or math.copysign(0, x), F32) if math.isfinite(x) else b

    return result


def with_floats() -> list[Line]:
    found = []
    for f in (F16, F32, F64):
        for mode in ("rni", "rzi", "rmi", "rpi"):
            for to, signed, bits in INTEGERS:
                if bits >= 16:
                    expected = float_to_int(f, mode, signed, bits)
                    found.append(Line(f"cvt.{mode}.{to}.{f.name} $0, $1;", expected, (f.dtype,), storage(bits)))
        for mode in MODES:
            for source, signed, bits in INTEGERS:
                expected = int_to_float(f, mode, signed, bits)
                found.append(Line(f"cvt.{mode}.{f.name}.{source} $0, $1;", expected, (storage(bits),), f.dtype))
    for mode in ("rni", "rzi", "rmi", "rpi"):
        found.append(Line(f"cvt.{mode}.f32.f32 $0, $1;", rounded_to_integer(mode), ("u4",)))
    return found


def narrowing(to: Format, source: Format, mode: str, relu: bool = False) -> Callable[[int], int]:
    def result(b: int) -> int:
        x = decode(b, source)
        if relu and (x < 0 or (x == 0 and b >> source.bits - 1)):
            return 0
        return encode(Fraction(x) if math.isfinite(x) and x else x, to, mode)

    return result


def tf32(b: int) -> int:
    x = decode(b, F32)
    return encode(x, F32) if math.isnan(x) else b if math.isinf(x) else (b + 0x1000) & 0xFFFFE000


def between_floats() -> list[Line]:
    found = [
        Line("cvt.f32.f16 $0, $1;", narrowing(F32, F16, "rn"), ("u2",)),
        Line("cvt.f64.f32 $0, $1;", narrowing(F64, F32, "rn"), ("u4",), "u8"),
        Line("cvt.rn.sat.f32.f64 $0, $1;", lambda b: _saturated(decode(b, F64)), ("u8",)),
        Line("cvt.rna.tf32.f32 $0, $1;", tf32, ("u4",)),
    ]
    found += [Line(f"cvt.{m}.f16.f32 $0, $1;", narrowing(F16, F32, m), ("u4",), "u2") for m in MODES]
    found += [Line(f"cvt.{m}.f32.f64 $0, $1;", narrowing(F32, F64, m), ("u8",)) for m in MODES]
    for f in (F16, BF16):
        for mode in ("rn", "rz"):
            found.append(Line(f"cvt.{mode}.bf16.f32 $0, $1;", narrowing(BF16, F32, mode), ("u4",), "u2"))
            for relu in (False, True):
                half = narrowing(f, F32, mode, relu)
                text = f"cvt.{mode}{'.relu' if relu else ''}.{f.name}x2.f32 $0, $1, $2;"
                found.append(Line(text, lambda a, b, h=half: h(a) << 16 | h(b), ("u4", "u4")))
    for sign in "us":
        found.append(Line(f"cvt.pack.sat.{sign}16.s32 $0, $1, $2;", packed(sign == "s", 16), ("u4", "u4")))
        bytes_ = packed(sign == "s", 8)
        text = f"cvt.pack.sat.{sign}8.s32.b32 $0, $1, $2, $3;"
        found.append(Line(text, lambda a, b, c, p=bytes_: c << 16 | p(a, b), ("u4", "u4", "u4")))
    return found


def packed(signed: bool, bits: int) -> Callable[[int, int], int]:
    def half(x: int) -> int:
        return clamp(s(x), *bounds(signed, bits)) & (1 << bits) - 1

    return lambda a, b: half(a) << bits | half(b)


def _saturated(x: float) -> int:
    return 0 if math.isnan(x) else encode(Fraction(min(max(x, 0.0), 1.0)), F32)


LINES = list({line.text: line for line in [*int_to_int(), *with_floats(), *between_floats()]}.values())
CHUNKS = [LINES[i : i + 60] for i in range(0, len(LINES), 60)]


@functools.cache
def inputs() -> dict[str, NDArray[Any]]:
    """Integers of every size; floats that are near integers, halves between them, and the ends of the ranges."""
    found = default_inputs(N)
    rng = np.random.default_rng(9)
    numbers = np.concatenate(
        [
            rng.normal(0, 100, 40).round(1),
            rng.integers(-300, 300, 30) + 0.5,
            np.ldexp(rng.normal(0, 1, 20), rng.integers(-20, 70, 20)),
        ]
    )
    for width, kind in ((2, np.float16), (4, np.float32), (8, np.float64)):
        with np.errstate(over="ignore"):
            bits = numbers.astype(kind).view(f"u{width}")
        found[f"u{width}_0"][: len(bits)] = bits
        found[f"u{width}_1"][len(bits) // 2 : len(bits)] = bits[: len(bits) - len(bits) // 2]
        special = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0]).astype(kind).view(f"u{width}")
        found[f"u{width}_0"][len(bits) : len(bits) + 5] = special
        small = np.array([5, 127, 128, 200, 255, (1 << width * 8) - 100], np.uint64).astype(f"u{width}")
        found[f"u{width}_0"][len(bits) + 5 : len(bits) + 11] = small
    return found


@functools.cache
def results(chunk: int) -> NDArray[np.uint64]:
    return run_table(CHUNKS[chunk], inputs(), N)


def is_float(text: str) -> Format | None:
    target = text.split(" ")[0].split(".")[-2]
    return {"f16": F16, "bf16": BF16, "f32": F32, "f64": F64, "tf32": F32}.get(target)


@pytest.mark.parametrize("chunk", range(len(CHUNKS)))
def test_conversions(emucuda: Control, chunk: int) -> None:
    for row, line in enumerate(CHUNKS[chunk]):
        columns = [inputs()[f"{dtype}_{k}"].tolist() for k, dtype in enumerate(line.inputs)]
        mask = (1 << np.dtype(line.output).itemsize * 8) - 1
        for n, arguments in enumerate(zip(*columns, strict=True)):
            expected, got = line.expected(*arguments) & mask, int(results(chunk)[row, n])
            f = is_float(line.text)
            both_nan = f and math.isnan(decode(expected, f)) and math.isnan(decode(got, f))
            pair_of_nan = "x2" in line.text and _equal_but_for_nans(
                got, expected, BF16 if "bf16x2" in line.text else F16
            )
            assert got == expected or both_nan or pair_of_nan, (
                f"{line.text} of {[hex(a) for a in arguments]}: {got:#x}, not {expected:#x}"
            )


def _equal_but_for_nans(got: int, expected: int, f: Format) -> bool:
    halves = [(got >> k & 0xFFFF, expected >> k & 0xFFFF) for k in (0, 16)]
    return all(a == b or (math.isnan(decode(a, f)) and math.isnan(decode(b, f))) for a, b in halves)
