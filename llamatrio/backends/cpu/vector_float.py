"""Arithmetic of f32, and the conversions to f16 and bf16 and back."""

from __future__ import annotations

from collections.abc import Callable

from llamatrio.backends.cpu.vector_core import Core
from llamatrio.backends.cpu.vector_types import LANES, Offset, Value, bfloat, f32, i16, vec, vf16, vf32, vi16, vi32


class FloatOps(Core):
    """On vectors of 16 and, where said, on scalars. Nothing is reassociated."""

    def _reduce(self, v: Value, combine: Callable[[Value, Value], Value]) -> Value:
        """Folds halves onto each other: the same tree, so the same bits, at every level."""
        n = v.type.count
        while n > 1:
            n //= 2
            v = combine(self.part(v, 0, n), self.part(v, n, n)) if n > 1 else v
        return combine(self.lane(v, 0), self.lane(v, 1))

    def reduce_add(self, v: Value) -> Value:
        """Sum of the lanes of f32, as a scalar."""
        return self._reduce(v, self.builder.fadd)

    def reduce_add_int(self, v: Value) -> Value:
        """Sum of the lanes of integers, as a scalar."""
        return self._reduce(v, self.builder.add)

    def reduce_max(self, v: Value) -> Value:
        """Largest lane of f32, as a scalar (no NaN expected)."""
        return self._reduce(v, self.fmax)

    # ---- f32 arithmetic, on vectors and scalars alike

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a * b + c, rounded once where the level has the instruction, else twice."""
        if not self.level.has_fma:
            return self.builder.fadd(self.builder.fmul(a, b), c)
        name = "llvm.fma.f32" if a.type == f32 else f"llvm.fma.v{a.type.count}f32"
        return self._call(name, a.type, a, b, c)

    def fadd(self, a: Value, b: Value) -> Value:
        return self.builder.fadd(a, b)

    def fsub(self, a: Value, b: Value) -> Value:
        return self.builder.fsub(a, b)

    def fmul(self, a: Value, b: Value) -> Value:
        return self.builder.fmul(a, b)

    def fdiv(self, a: Value, b: Value) -> Value:
        return self.builder.fdiv(a, b)

    def fneg(self, a: Value) -> Value:
        return self.builder.fneg(a)

    def fmax(self, a: Value, b: Value) -> Value:
        """The larger; b where either is NaN (as x86's max)."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def fmin(self, a: Value, b: Value) -> Value:
        """The smaller; b where either is NaN."""
        return self.builder.select(self.builder.fcmp_ordered("<", a, b), a, b)

    def fabs(self, a: Value) -> Value:
        """Absolute value."""
        name = "llvm.fabs.f32" if a.type == f32 else f"llvm.fabs.v{a.type.count}f32"
        return self._call(name, a.type, a)

    def sqrt(self, a: Value) -> Value:
        """Square root, correctly rounded."""
        name = "llvm.sqrt.f32" if a.type == f32 else f"llvm.sqrt.v{a.type.count}f32"
        return self._call(name, a.type, a)

    def round_to_int(self, a: Value) -> Value:
        """f32 vector to i32, to nearest, ties to even; |a| < 2^22."""
        # Adding 1.5 * 2^23 leaves the rounded integer in the low mantissa bits: no libcall at any level.
        magic = 12582912.0
        shifted = self.builder.fadd(a, self.splat_f32(magic))
        return self.builder.sub(self.bitcast(shifted, vi32), self.splat_int(0x4B400000))

    def exp(self, x: Value) -> Value:
        """e ** x for 16 x f32; 0 below -87.3, relative error about 1e-7 up to 88.

        x = n ln 2 + r with ln 2 in two parts (Cody and Waite), then a Taylor polynomial for |r| <= ln 2 / 2.
        """
        x_low = self.fmax(self.fmin(x, self.splat_f32(88.0)), self.splat_f32(-87.3))
        n = self.round_to_int(self.fmul(x_low, self.splat_f32(1.4426950408889634)))
        nf = self.to_f32(n)
        r = self.fma(nf, self.splat_f32(-0.693145751953125), x_low)
        r = self.fma(nf, self.splat_f32(-1.428606820309417e-06), r)
        p = self.splat_f32(1 / 5040)
        for coefficient in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0):
            p = self.fma(p, r, self.splat_f32(coefficient))
        power = self.builder.shl(self.builder.add(n, self.splat_int(127)), self.splat_int(23))
        result = self.fmul(p, self.bitcast(power, vf32))
        too_low = self.builder.fcmp_ordered("<", x, self.splat_f32(-87.3))
        return self.select(too_low, self.zero(vf32), result)

    # ---- f16 and bf16

    def load_f16(self, base: Value, offset: Offset) -> Value:
        """16 halves (32 bytes) as 16 x f32."""
        return self.f16_to_f32(self.load(base, offset, vi16))

    def store_f16(self, v: Value, base: Value, offset: Offset) -> None:
        """16 x f32 as 16 halves, rounded to nearest even."""
        self.store(self.f32_to_f16(v), base, offset)

    def f16_to_f32(self, bits: Value) -> Value:
        """The bits of 16 halves (16 x i16) as 16 x f32, exactly."""
        if self.level.has_f16:
            return self.builder.fpext(self.bitcast(bits, vf16), vf32)
        b = self.builder
        wide = b.zext(bits, vi32)
        sign = b.shl(b.and_(wide, self.splat_int(0x8000)), self.splat_int(16))
        magnitude = b.shl(b.and_(wide, self.splat_int(0x7FFF)), self.splat_int(13))
        # The exponent is 112 too small; a product mends subnormals as well, but not infinity and NaN.
        scaled = self.bitcast(b.fmul(self.bitcast(magnitude, vf32), self.splat_f32(2.0**112)), vi32)
        is_special = b.icmp_unsigned(">=", magnitude, self.splat_int(0x7C00 << 13))
        special = b.or_(magnitude, self.splat_int(0x7F800000))
        return self.bitcast(b.or_(b.select(is_special, special, scaled), sign), vf32)

    def f32_to_f16(self, v: Value) -> Value:
        """16 x f32 as the bits of 16 halves (16 x i16), rounded to nearest even."""
        if self.level.has_f16:
            return self.bitcast(self.builder.fptrunc(v, vf16), vi16)
        b = self.builder
        bits = self.bitcast(v, vi32)
        sign = b.lshr(b.and_(bits, self.splat_int(0x80000000)), self.splat_int(16))
        magnitude = b.and_(bits, self.splat_int(0x7FFFFFFF))
        # Normal: drop 13 bits with round to even, rebias the exponent by -112.
        odd = b.and_(b.lshr(magnitude, self.splat_int(13)), self.splat_int(1))
        rounded = b.add(b.add(magnitude, self.splat_int(0xFFF)), odd)
        normal = b.sub(b.lshr(rounded, self.splat_int(13)), self.splat_int(112 << 10))
        # Subnormal: adding 0.5 puts the last kept bit (2^-24) at the end of the f32 mantissa.
        shifted = b.fadd(self.bitcast(magnitude, vf32), self.splat_f32(0.5))
        subnormal = b.sub(self.bitcast(shifted, vi32), self.splat_int(0x3F000000))
        result = b.select(b.icmp_unsigned("<", magnitude, self.splat_int(0x38800000)), subnormal, normal)
        overflow = b.icmp_unsigned(">=", magnitude, self.splat_int(0x477FF000))
        is_nan = b.icmp_unsigned(">", magnitude, self.splat_int(0x7F800000))
        infinity_or_nan = b.select(is_nan, self.splat_int(0x7E00), self.splat_int(0x7C00))
        return b.trunc(b.or_(b.select(overflow, infinity_or_nan, result), sign), vi16)

    def bf16_high_bits(self, v: Value) -> Value:
        """16 x f32 (finite) rounded to bf16 (nearest even), as 16 x i32 whose upper halves hold the result."""
        b = self.builder
        bits = self.bitcast(v, vi32)
        odd = b.and_(b.lshr(bits, self.splat_int(16)), self.splat_int(1))
        return b.add(b.add(bits, self.splat_int(0x7FFF)), odd)

    def f32_to_bf16(self, v: Value) -> Value:
        """16 x f32 (finite) as the bits of 16 bf16 (16 x i16), rounded to nearest even."""
        return self.builder.trunc(self.builder.lshr(self.bf16_high_bits(v), self.splat_int(16)), vi16)

    def bf16_pairs(self, even: Value, odd: Value) -> Value:
        """Lane i holds bf16(even[i]) in its low half and bf16(odd[i]) in its high half (16 x i32)."""
        b = self.builder
        if self.level.has_bf16:
            both = self._call("llvm.x86.avx512bf16.cvtne2ps2bf16.512", vec(bfloat, 2 * LANES), odd, even)
            words = self.bitcast(both, vec(i16, 2 * LANES))
            interleaved = [n // 2 + LANES * (n % 2) for n in range(2 * LANES)]
            return self.bitcast(self.shuffle(words, words, interleaved), vi32)
        low = b.lshr(self.bf16_high_bits(even), self.splat_int(16))
        return b.or_(low, b.and_(self.bf16_high_bits(odd), self.splat_int(0xFFFF0000)))

    def dot_bf16(self, x: Value, y: Value, total: Value) -> Value:
        """total + the sum of the two products of bf16 in each lane of x and y (16 x i32). Only where has_bf16."""
        pairs = vec(bfloat, 2 * LANES)
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        return self._call(name, vf32, total, self.bitcast(x, pairs), self.bitcast(y, pairs))

    def bf16_to_f32(self, bits: Value) -> Value:
        """The bits of 16 bf16 (16 x i16) as 16 x f32."""
        return self.bitcast(self.builder.shl(self.builder.zext(bits, vi32), self.splat_int(16)), vf32)
