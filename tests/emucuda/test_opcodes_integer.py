"""Integer instructions against Python's integers, as the PTX manual defines them."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from .control import Control
from .opcode_table import Line, default_inputs, run_table

N = 128


def s(x: int, bits: int = 32) -> int:
    """Reads bits as signed."""
    x &= (1 << bits) - 1
    return x - (1 << bits) if x >> (bits - 1) else x


def clamp(x: int, low: int, high: int) -> int:
    return max(low, min(high, x))


def quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def bytes_of(x: int) -> list[int]:
    return [x >> 8 * i & 255 for i in range(4)]


def prmt(a: int, b: int, selector: int) -> int:
    pool = bytes_of(a) + bytes_of(b)
    result = 0
    for i in range(4):
        pick = selector >> 4 * i & 15
        byte = pool[pick & 7]
        if pick & 8:
            byte = 255 if byte & 128 else 0
        result |= byte << 8 * i
    return result


def bfe(a: int, b: int, c: int, signed: bool, bits: int = 32) -> int:
    position, length = b & 255, c & 255
    top = min(position + length - 1, bits - 1)
    sign = (a >> top & 1) if signed and length else 0
    return sum(((a >> position + i & 1) if i < length and position + i < bits else sign) << i for i in range(bits))


def bfi(a: int, b: int, c: int, d: int) -> int:
    for i in range(d & 255):
        if (c & 255) + i < 32:
            b = b & ~(1 << (c & 255) + i) | (a >> i & 1) << (c & 255) + i
    return b


def highest(x: int, bits: int = 32) -> int:
    return x.bit_length() - 1 if x else 0xFFFFFFFF


def table(a: int, b: int, c: int, lut: int) -> int:
    return sum((lut >> ((a >> i & 1) * 4 + (b >> i & 1) * 2 + (c >> i & 1)) & 1) << i for i in range(32))


def dp4a(a: int, b: int, c: int, a_signed: bool, b_signed: bool) -> int:
    pick = lambda x, signed: [s(v, 8) if signed else v for v in bytes_of(x)]  # noqa: E731
    return c + sum(x * y for x, y in zip(pick(a, a_signed), pick(b, b_signed), strict=True))


def dp2a(a: int, b: int, c: int, half: int) -> int:
    return c + sum(s(a >> 16 * i, 16) * s(b >> 8 * (i + 2 * half), 8) for i in range(2))


def shift(a: int, n: int, bits: int, signed: bool) -> int:
    return (s(a, bits) if signed else a) >> min(n, bits)


def lines_of_width(w: int) -> list[Line]:
    """Instructions that 16, 32 and 64 bits share."""
    u, bits = f"u{w // 8}", w
    one, two, three = (u,), (u, u), (u, u, u)
    m = (1 << bits) - 1
    line = functools.partial(Line, output=u)
    return [
        line(f"add.u{w} $0, $1, $2;", lambda a, b: a + b, two),
        line(f"sub.s{w} $0, $1, $2;", lambda a, b: a - b, two),
        line(f"mul.lo.s{w} $0, $1, $2;", lambda a, b: a * b, two),
        line(f"mul.hi.u{w} $0, $1, $2;", lambda a, b: a * b >> bits, two),
        line(f"mul.hi.s{w} $0, $1, $2;", lambda a, b: s(a, bits) * s(b, bits) >> bits, two),
        line(f"mad.lo.u{w} $0, $1, $2, $3;", lambda a, b, c: a * b + c, three),
        line(f"div.u{w} $0, $1, $2;", lambda a, b: a // b if b else m, two),
        line(f"div.s{w} $0, $1, $2;", lambda a, b: quotient(s(a, bits), s(b, bits)) if b else m, two),
        line(f"rem.u{w} $0, $1, $2;", lambda a, b: a % b if b else a, two),
        line(
            f"rem.s{w} $0, $1, $2;",
            lambda a, b: s(a, bits) - s(b, bits) * quotient(s(a, bits), s(b, bits)) if b else a,
            two,
        ),
        line(f"min.s{w} $0, $1, $2;", lambda a, b: min(s(a, bits), s(b, bits)), two),
        line(f"max.u{w} $0, $1, $2;", max, two),
        line(f"abs.s{w} $0, $1;", lambda a: abs(s(a, bits)), one),
        line(f"neg.s{w} $0, $1;", lambda a: -a, one),
        line(f"and.b{w} $0, $1, $2;", lambda a, b: a & b, two),
        line(f"or.b{w} $0, $1, $2;", lambda a, b: a | b, two),
        line(f"xor.b{w} $0, $1, $2;", lambda a, b: a ^ b, two),
        line(f"not.b{w} $0, $1;", lambda a: ~a, one),
        line(f"cnot.b{w} $0, $1;", lambda a: int(a == 0), one),
        line(f"shl.b{w} $0, $1, $2;", lambda a, n: a << min(n, bits), (u, "u4")),
        line(f"shr.u{w} $0, $1, $2;", lambda a, n: shift(a, n, bits, False), (u, "u4")),
        line(f"shr.s{w} $0, $1, $2;", lambda a, n: shift(a, n, bits, True), (u, "u4")),
    ]


TWO, THREE = ("u4", "u4"), ("u4", "u4", "u4")
PRMT_MODES = {
    "f4e": (0x3210, 0x4321, 0x5432, 0x6543), "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
    "rc8": (0x0000, 0x1111, 0x2222, 0x3333), "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
    "ecr": (0x0000, 0x1110, 0x2210, 0x3210), "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
}  # fmt: skip

LINES = [
    *lines_of_width(16),
    *lines_of_width(32),
    *lines_of_width(64),
    Line("add.sat.s32 $0, $1, $2;", lambda a, b: clamp(s(a) + s(b), -(1 << 31), (1 << 31) - 1), TWO),
    Line("sub.sat.s32 $0, $1, $2;", lambda a, b: clamp(s(a) - s(b), -(1 << 31), (1 << 31) - 1), TWO),
    Line("mul.wide.s32 $0, $1, $2;", lambda a, b: s(a) * s(b), TWO, "u8"),
    Line("mul.wide.u32 $0, $1, $2;", lambda a, b: a * b, TWO, "u8"),
    Line("mul.wide.u16 $0, $1, $2;", lambda a, b: a * b, ("u2", "u2")),
    Line("mad.wide.s32 $0, $1, $2, $3;", lambda a, b, c: s(a) * s(b) + c, ("u4", "u4", "u8"), "u8"),
    Line("mul24.lo.u32 $0, $1, $2;", lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF), TWO),
    Line("mul24.hi.s32 $0, $1, $2;", lambda a, b: s(a, 24) * s(b, 24) >> 16, TWO),
    Line("mad24.lo.s32 $0, $1, $2, $3;", lambda a, b, c: s(a, 24) * s(b, 24) + c, THREE),
    Line("sad.s32 $0, $1, $2, $3;", lambda a, b, c: c + abs(s(a) - s(b)), THREE),
    Line("{ .reg .u32 t; add.cc.u32 t, $1, $2; addc.u32 $0, $3, 0; }", lambda a, b, c: c + (a + b >> 32), THREE),
    Line("{ .reg .u32 t; sub.cc.u32 t, $1, $2; subc.u32 $0, $3, 0; }", lambda a, b, c: c - (a < b), THREE),
    Line("lop3.b32 $0, $1, $2, $3, 0xe8;", lambda a, b, c: table(a, b, c, 0xE8), THREE),
    Line("lop3.b32 $0, $1, $2, $3, 0x1b;", lambda a, b, c: table(a, b, c, 0x1B), THREE),
    Line("shf.l.wrap.b32 $0, $1, $2, $3;", lambda a, b, c: (b << 32 | a) << (c & 31) >> 32, THREE),
    Line("shf.r.wrap.b32 $0, $1, $2, $3;", lambda a, b, c: (b << 32 | a) >> (c & 31), THREE),
    Line("shf.l.clamp.b32 $0, $1, $2, $3;", lambda a, b, c: (b << 32 | a) << min(c, 32) >> 32, THREE),
    Line("shf.r.clamp.b32 $0, $1, $2, $3;", lambda a, b, c: (b << 32 | a) >> min(c, 32), THREE),
    Line("prmt.b32 $0, $1, $2, $3;", prmt, THREE),
    *(
        Line(f"prmt.b32.{mode} $0, $1, $2, $3;", lambda a, b, c, p=picks: prmt(a, b, p[c & 3]), THREE)
        for mode, picks in PRMT_MODES.items()
    ),
    Line("bfe.u32 $0, $1, $2, $3;", lambda a, b, c: bfe(a, b, c, False), THREE),
    Line("bfe.s32 $0, $1, $2, $3;", lambda a, b, c: bfe(a, b, c, True), THREE),
    Line("bfe.u32 $0, $1, 5, 9;", lambda a: a >> 5 & 511, ("u4",)),
    Line("bfe.s32 $0, $1, 28, 9;", lambda a: s(a) >> 28, ("u4",)),
    Line("bfi.b32 $0, $1, $2, $3, 7;", lambda a, b, c: bfi(a, b, c, 7), THREE),
    Line("bfi.b32 $0, $1, $2, 12, $3;", lambda a, b, c: bfi(a, b, 12, c), THREE),
    Line("bfind.u32 $0, $1;", highest, ("u4",)),
    Line("bfind.s32 $0, $1;", lambda a: highest(a ^ 0xFFFFFFFF if a >> 31 else a), ("u4",)),
    Line("bfind.shiftamt.u32 $0, $1;", lambda a: 31 - highest(a) if a else 0xFFFFFFFF, ("u4",)),
    Line("bfind.u64 $0, $1;", highest, ("u8",)),
    Line("brev.b32 $0, $1;", lambda a: int(f"{a:032b}"[::-1], 2), ("u4",)),
    Line("brev.b64 $0, $1;", lambda a: int(f"{a:064b}"[::-1], 2), ("u8",), "u8"),
    Line("popc.b32 $0, $1;", int.bit_count, ("u4",)),
    Line("popc.b64 $0, $1;", int.bit_count, ("u8",)),
    Line("clz.b32 $0, $1;", lambda a: 32 - a.bit_length(), ("u4",)),
    Line("clz.b64 $0, $1;", lambda a: 64 - a.bit_length(), ("u8",)),
    Line("bmsk.clamp.b32 $0, $1, $2;", lambda a, b: ((1 << min(b, 32)) - 1) << min(a, 32), TWO),
    Line("bmsk.wrap.b32 $0, $1, $2;", lambda a, b: ((1 << (b & 31)) - 1) << (a & 31), TWO),
    Line("szext.clamp.s32 $0, $1, $2;", lambda a, b: s(a, min(b, 32)) if b else 0, TWO),
    Line("dp4a.s32.s32 $0, $1, $2, $3;", lambda a, b, c: dp4a(a, b, c, True, True), THREE),
    Line("dp4a.u32.u32 $0, $1, $2, $3;", lambda a, b, c: dp4a(a, b, c, False, False), THREE),
    Line("dp4a.u32.s32 $0, $1, $2, $3;", lambda a, b, c: dp4a(a, b, c, False, True), THREE),
    Line("dp2a.lo.s32.s32 $0, $1, $2, $3;", lambda a, b, c: dp2a(a, b, c, 0), THREE),
    Line("dp2a.hi.s32.s32 $0, $1, $2, $3;", lambda a, b, c: dp2a(a, b, c, 1), THREE),
    Line("{ .reg .pred p; setp.lt.s32 p, $1, $2; selp.b32 $0, $1, $3, p; }",
         lambda a, b, c: a if s(a) < s(b) else c, THREE),
    Line("slct.b32.s32 $0, $1, $2, $3;", lambda a, b, c: a if s(c) >= 0 else b, THREE),
    *(
        Line(f"set.{name}.u32.{ty} $0, $1, $2;", lambda a, b, t=test, r=read: -int(t(r(a), r(b))), TWO)
        for ty, names, read in (
            ("s32", ("eq", "ne", "lt", "le", "gt", "ge"), s),
            ("u32", ("eq", "ne", "lo", "ls", "hi", "hs"), int),
        )
        for name, test in zip(
            names,
            (int.__eq__, int.__ne__, int.__lt__, int.__le__, int.__gt__, int.__ge__),
            strict=True,
        )
    ),
    Line(
        "{ .reg .pred p, q; setp.gt.u32 q, $3, 99; setp.eq.and.u32 p, $1, $2, q; selp.u32 $0, 1, 0, p; }",
        lambda a, b, c: int(a == b and c > 99),
        THREE,
    ),
    Line(
        "{ .reg .pred p, q; setp.ge.u32 p|q, $1, $2; selp.u32 $0, 1, 2, q; }",
        lambda a, b: 1 if a < b else 2,
        TWO,
    ),
    Line("{ .reg .b16 l, h; mov.b32 {l, h}, $1; mov.b32 $0, {h, l}; }", lambda a: a >> 16 | a << 16, ("u4",)),
    Line("mov.b64 $0, {$1, $2};", lambda a, b: b << 32 | a, TWO, "u8"),
]  # fmt: skip


@functools.cache
def inputs() -> dict[str, NDArray[Any]]:
    found = default_inputs(N)
    found["u4_1"][::3] &= 63  # shift counts and field positions that mean something
    found["u4_2"][::3] &= 63
    return found


@functools.cache
def results() -> NDArray[np.uint64]:
    return run_table(LINES, inputs(), N)


@pytest.mark.parametrize("row", range(len(LINES)), ids=[line.id for line in LINES])
def test_instruction(emucuda: Control, row: int) -> None:
    line = LINES[row]
    columns = [inputs()[f"{dtype}_{k}"] for k, dtype in enumerate(line.inputs)]
    mask = (1 << np.dtype(line.output).itemsize * 8) - 1
    for n, arguments in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        expected = line.expected(*arguments) & mask
        assert results()[row, n] == expected, f"{line.text} of {[hex(a) for a in arguments]}: not {expected:#x}"
