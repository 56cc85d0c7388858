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

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

from llvmlite import ir

from llamatrio.backends.cpu.levels import Level

Value = Any
"""An llvmlite ir.Value; llvmlite has no type hints."""
Offset = Any
"""A byte offset: a Python int or an i64 Value."""

i1, i8, i16, i32, i64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
f16, f32 = ir.HalfType(), ir.FloatType()
pointer = ir.PointerType()


class _BFloat(ir.Type):  # type: ignore[misc]  # llvmlite has no type hints
    """LLVM's bfloat, which llvmlite lacks; only ever a result that is bitcast at once."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_bfloat = _BFloat()

LANES = 16


def vec(element: Any, n: int = LANES) -> Any:
    """The vector type of `n` elements."""
    return ir.VectorType(element, n)


vf32, vi32, vf16, vi16, vi8 = vec(f32), vec(i32), vec(f16), vec(i16), vec(i8)
vbytes = vec(i8, 4 * LANES)


class _ByteLookup(NamedTuple):
    """An instruction that looks each byte up in a table of 16: both operands are `width` bytes."""

    name: str
    width: int


_BYTE_LOOKUPS = {
    "vnni": _ByteLookup("llvm.x86.avx512.pshuf.b.512", 64),
    "maddubs": _ByteLookup("llvm.x86.avx2.pshuf.b", 32),
    "sdot": _ByteLookup("llvm.aarch64.neon.tbl1.v16i8", 16),
}


class Asm:
    """Appends operations to one function under construction."""

    def __init__(self, builder: ir.IRBuilder, level: Level) -> None:
        self.builder = builder
        self.level = level

    # ---- constants

    def int64(self, n: int) -> Value:
        """An i64 constant."""
        return ir.Constant(i64, n)

    def int32(self, n: int) -> Value:
        """An i32 constant."""
        return ir.Constant(i32, n)

    def float32(self, x: float) -> Value:
        """An f32 constant (rounded from the Python float)."""
        return ir.Constant(f32, _as_f32(x))

    def splat_f32(self, x: float) -> Value:
        """A constant vector of 16 x f32."""
        return ir.Constant(vf32, [self.float32(x)] * LANES)

    def splat_int(self, n: int, element: Any = i32, count: int = LANES) -> Value:
        """A constant vector of `count` integers (default 16 x i32)."""
        return ir.Constant(vec(element, count), [ir.Constant(element, n)] * count)

    def zero(self, kind: Any) -> Value:
        """The zero of a type."""
        return ir.Constant(kind, None)

    # ---- addresses and memory

    def pointer(self, address: Value) -> Value:
        """An i64 address as a pointer."""
        return self.builder.inttoptr(address, pointer)

    def at(self, base: Value, offset: Offset) -> Value:
        """The pointer `offset` bytes behind `base`."""
        if isinstance(offset, int):
            offset = self.int64(offset)
        return self.builder.gep(base, [offset], source_etype=i8)

    def load(self, base: Value, offset: Offset, kind: Any, align: int = 1) -> Value:
        """Loads a `kind` from base + offset bytes."""
        return self.builder.load(self.at(base, offset), typ=kind, align=align)

    def store(self, value: Value, base: Value, offset: Offset, align: int = 1) -> None:
        """Stores to base + offset bytes."""
        self.builder.store(value, self.at(base, offset), align=align)

    def load_splat(self, base: Value, offset: Offset, element: Any = f32) -> Value:
        """Loads one 32-bit element into all 16 lanes."""
        return self.splat(self.load(base, offset, element))

    def prefetch(self, base: Value, offset: Offset, into: Literal["L1", "L2"] = "L2") -> None:
        """Asks for the cache line at base + offset; any address is allowed."""
        locality = {"L1": 3, "L2": 2}[into]
        self._void("llvm.prefetch.p0", self.at(base, offset), self.int32(0), self.int32(locality), self.int32(1))

    def prefetch_lines(self, base: Value, offset: Offset, n_bytes: int) -> None:
        """Asks for n_bytes (a Python int) from base + offset on into L2."""
        for line in range(0, n_bytes, 64):
            self.prefetch(base, self.add(offset, line))

    # ---- i64 arithmetic (Python ints are taken as constants)

    def add(self, *terms: Offset) -> Offset:
        """Sum of i64 values and ints."""
        constant = sum(term for term in terms if isinstance(term, int))
        total: Offset = None
        for term in terms:
            if not isinstance(term, int):
                total = term if total is None else self.builder.add(total, term)
        if total is None:
            return constant
        return self.builder.add(total, self.int64(constant)) if constant else total

    def mul(self, a: Offset, b: Offset) -> Offset:
        """Product of two i64 values or ints."""
        if isinstance(a, int) and isinstance(b, int):
            return a * b
        return self.builder.mul(*(self.int64(x) if isinstance(x, int) else x for x in (a, b)))

    def div(self, a: Value, b: int) -> Value:
        """a // b for a >= 0 and b a power of two."""
        assert b & (b - 1) == 0
        return self.builder.lshr(a, self.int64(b.bit_length() - 1))

    # ---- control flow

    def loop(
        self,
        start: Offset,
        stop: Offset,
        carried: Sequence[Value],
        body: Callable[[Value, list[Value]], Sequence[Value]],
        step: Offset = 1,
    ) -> list[Value]:
        """for i in range(start, stop, step): carried = body(i, carried). Returns the last carried values.

        `step` is positive; the body does not run when start >= stop.
        """
        b = self.builder
        start, stop, step = (self.int64(x) if isinstance(x, int) else x for x in (start, stop, step))
        before = b.block
        head, done = b.append_basic_block("loop"), b.append_basic_block("done")
        b.cbranch(b.icmp_signed("<", start, stop), head, done)

        b.position_at_end(head)
        index = b.phi(i64)
        index.add_incoming(start, before)
        phis = [self._phi(value, before) for value in carried]
        results = list(body(index, list(phis)))
        latch = b.block
        following = b.add(index, step)
        index.add_incoming(following, latch)
        for phi, result in zip(phis, results, strict=True):
            phi.add_incoming(result, latch)
        b.cbranch(b.icmp_signed("<", following, stop), head, done)

        b.position_at_end(done)
        finals = [self._phi(value, before) for value in carried]
        for final, result in zip(finals, results, strict=True):
            final.add_incoming(result, latch)
        return finals

    def _phi(self, value: Value, block: Any) -> Value:
        phi = self.builder.phi(value.type)
        phi.add_incoming(value, block)
        return phi

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """Code in the block runs only if the i1 `condition` holds."""
        with self.builder.if_then(condition):
            yield

    @contextmanager
    def choose(self, condition: Value) -> Iterator[tuple[Any, Any]]:
        """Gives two contexts: code in the first runs if the i1 `condition` holds, in the second if not."""
        with self.builder.if_else(condition) as branches:
            yield branches

    def equal(self, a: Value, b: int) -> Value:
        """The i1 a == b, of i64."""
        return self.builder.icmp_signed("==", a, self.int64(b))

    def less(self, a: Value, b: Offset) -> Value:
        """The i1 a < b, of signed i64."""
        return self.builder.icmp_signed("<", a, self.int64(b) if isinstance(b, int) else b)

    def select(self, condition: Value, yes: Value, no: Value) -> Value:
        """Lane-wise (or whole) choice."""
        return self.builder.select(condition, yes, no)

    def minimum(self, a: Value, b: Value) -> Value:
        """The smaller of two signed i64."""
        return self.builder.select(self.builder.icmp_signed("<", a, b), a, b)

    def maximum(self, a: Value, b: Value) -> Value:
        """The larger of two signed i64."""
        return self.builder.select(self.builder.icmp_signed(">", a, b), a, b)

    # ---- lanes

    def splat(self, x: Value, n: int = LANES) -> Value:
        """A scalar in all n lanes."""
        undefined = ir.Constant(vec(x.type, n), ir.Undefined)
        first = self.builder.insert_element(undefined, x, self.int32(0))
        return self.builder.shuffle_vector(first, undefined, ir.Constant(vec(i32, n), [self.int32(0)] * n))

    def lane(self, v: Value, n: int | Value) -> Value:
        """Element n of a vector; n is an int or an i32 value."""
        return self.builder.extract_element(v, self.int32(n) if isinstance(n, int) else n)

    def shuffle(self, a: Value, b: Value, picks: Sequence[int]) -> Value:
        """Elements `picks` of a followed by b."""
        mask = ir.Constant(vec(i32, len(picks)), [self.int32(p) for p in picks])
        return self.builder.shuffle_vector(a, b, mask)

    def part(self, v: Value, first: int, n: int) -> Value:
        """Elements first .. first + n of a vector."""
        return self.shuffle(v, v, range(first, first + n))

    def concat(self, parts: Sequence[Value]) -> Value:
        """Vectors of equal width, joined; their number is a power of two."""
        joined = list(parts)
        while len(joined) > 1:
            n = joined[0].type.count
            joined = [self.shuffle(a, b, range(2 * n)) for a, b in zip(joined[::2], joined[1::2], strict=True)]
        return joined[0]

    def bitcast(self, v: Value, kind: Any) -> Value:
        """The same bits as another type."""
        return self.builder.bitcast(v, kind)

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

    def to_f32(self, v: Value) -> Value:
        """Signed integers to f32, lane by lane."""
        return self.builder.sitofp(v, vec(f32, v.type.count) if isinstance(v.type, ir.VectorType) else f32)

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
            both = self._call("llvm.x86.avx512bf16.cvtne2ps2bf16.512", vec(_bfloat, 2 * LANES), odd, even)
            words = self.bitcast(both, vec(i16, 2 * LANES))
            interleaved = [n // 2 + LANES * (n % 2) for n in range(2 * LANES)]
            return self.bitcast(self.shuffle(words, words, interleaved), vi32)
        low = b.lshr(self.bf16_high_bits(even), self.splat_int(16))
        return b.or_(low, b.and_(self.bf16_high_bits(odd), self.splat_int(0xFFFF0000)))

    def bf16_to_f32(self, bits: Value) -> Value:
        """The bits of 16 bf16 (16 x i16) as 16 x f32."""
        return self.bitcast(self.builder.shl(self.builder.zext(bits, vi32), self.splat_int(16)), vf32)

    # ---- bytes

    def bytes_and(self, v: Value, mask: int) -> Value:
        """Each of 64 bytes & mask."""
        return self.builder.and_(v, self.splat_int(mask, i8, v.type.count))

    def bytes_shift(self, v: Value, n: int, mask: int) -> Value:
        """(byte >> n) & mask for each of 64 bytes; n < 0 shifts left. Shifts whole lanes, then masks."""
        lanes = self.bitcast(v, vi32)
        if n > 0:
            lanes = self.builder.lshr(lanes, self.splat_int(n))
        elif n < 0:
            lanes = self.builder.shl(lanes, self.splat_int(-n))
        return self.bytes_and(self.bitcast(lanes, vbytes), mask)

    def bytes_to_f32(self, v: Value) -> list[Value]:
        """Byte c of each of the 16 lanes (unsigned) as 16 x f32, for c = 0..3."""
        lanes = self.bitcast(v, vi32)
        shifted = [self.builder.lshr(lanes, self.splat_int(8 * c)) for c in range(4)]
        return [self.to_f32(self.builder.and_(lane, self.splat_int(0xFF))) for lane in shifted]

    def lookup16(self, table: Sequence[int], v: Value) -> Value:
        """table[byte] for each of 64 bytes below 16; the table has 16 entries of one byte."""
        lookup = _BYTE_LOOKUPS.get(self.level.dot)
        if lookup is None:
            return self._lookup16_by_choice(table, v)
        kind = vec(i8, lookup.width)
        entries = ir.Constant(kind, [ir.Constant(i8, entry) for entry in table] * (lookup.width // 16))
        parts = [self.part(v, first, lookup.width) for first in range(0, v.type.count, lookup.width)]
        return self.concat([self._call(lookup.name, kind, entries, part) for part in parts])

    def _lookup16_by_choice(self, table: Sequence[int], v: Value) -> Value:
        result = self.splat_int(table[0], i8, v.type.count)
        for n, entry in enumerate(table[1:], start=1):
            matches = self.builder.icmp_unsigned("==", v, self.splat_int(n, i8, v.type.count))
            result = self.select(matches, self.splat_int(entry, i8, v.type.count), result)
        return result

    def dot(self, weights: Sequence[Value], activations: Sequence[Value], bits: int) -> Value:
        """Sum over the pairs of the four byte products in each 32-bit lane, as 16 x i32, exactly.

        `weights` are 64 unsigned bytes below 2 ** bits, `activations` 64 signed bytes above -128.
        """
        pairs = list(zip(weights, activations, strict=True))
        if self.level.dot == "vnni":
            return self._dot_vnni(pairs)
        if self.level.dot == "maddubs":
            return self._dot_maddubs(_halved(self, pairs), 7) if bits == 8 else self._dot_maddubs(pairs, bits)
        if self.level.dot == "sdot":
            return self._dot_sdot(_less_128(self, pairs) if bits == 8 else pairs)
        return self._dot_wide(pairs, self._zero_extended)

    def dot_signed(self, weights: Sequence[Value], activations: Sequence[Value]) -> Value:
        """As dot, for 64 signed bytes of any value. Worth it for 8-bit weights where VNNI is missing."""
        pairs = list(zip(weights, activations, strict=True))
        if self.level.dot == "maddubs":  # |w| * (x with the sign of w)
            sizes = [self._call("llvm.abs.v64i8", vbytes, w, ir.Constant(i1, 0)) for w in weights]
            turned = [self._halves("llvm.x86.avx2.psign.b", vec(i8, 32), x, w) for w, x in pairs]
            return self._dot_maddubs(list(zip(sizes, turned, strict=True)), 7)
        if self.level.dot == "sdot":
            return self._dot_sdot(pairs)
        if self.level.dot == "vnni":
            flip = self.splat_int(0x80, i8, 64)
            unsigned = self._dot_vnni([(self.builder.xor(w, flip), x) for w, x in pairs])
            return self.builder.sub(unsigned, self._dot_vnni([(flip, x) for _, x in pairs]))
        return self._dot_wide(pairs, self._sign_extended)

    def _dot_vnni(self, pairs: Sequence[tuple[Value, Value]]) -> Value:
        total = self.zero(vi32)
        for weight, activation in pairs:
            total = self._call("llvm.x86.avx512.vpdpbusd.512", vi32, total, weight, activation)
        return total

    def _dot_maddubs(self, pairs: Sequence[tuple[Value, Value]], bits: int) -> Value:
        """vpmaddubsw saturates at 16 bits: as many products are added there as are sure to fit."""
        room = max(1, 32767 // (2 * 127 * (2**bits - 1)))
        ones, total = self.splat_int(1, i16, 32), self.zero(vi32)
        for first in range(0, len(pairs), room):
            words: Value = None
            for weight, activation in pairs[first : first + room]:
                product = self._halves("llvm.x86.avx2.pmadd.ub.sw", vec(i16, 16), weight, activation)
                words = product if words is None else self.builder.add(words, product)
            total = self.builder.add(total, self._halves("llvm.x86.avx2.pmadd.wd", vec(i32, 8), words, ones))
        return total

    def _halves(self, name: str, kind: Any, a: Value, b: Value) -> Value:
        """An AVX2 operation of 32 bytes on both halves of 64."""
        n = a.type.count // 2
        return self.concat([self._call(name, kind, self.part(a, at, n), self.part(b, at, n)) for at in (0, n)])

    def _dot_sdot(self, pairs: Sequence[tuple[Value, Value]]) -> Value:
        quarters = []
        for first in range(0, 64, 16):
            total = self.zero(vec(i32, 4))
            for weight, activation in pairs:
                w, x = self.part(weight, first, 16), self.part(activation, first, 16)
                total = self._call("llvm.aarch64.neon.sdot.v4i32.v16i8", vec(i32, 4), total, w, x)
            quarters.append(total)
        return self.concat(quarters)

    def _dot_wide(
        self, pairs: Sequence[tuple[Value, Value]], extended: Callable[[Value], tuple[Value, Value]]
    ) -> Value:
        """16-bit products of the even and the odd bytes; LLVM makes pmaddwd of them where there is one."""
        total = self.zero(vi32)
        for weight, activation in pairs:
            for w, x in zip(extended(weight), self._sign_extended(activation), strict=True):
                total = self.builder.add(total, self._multiply_add_pairs(w, x))
        return total

    def _zero_extended(self, v: Value) -> tuple[Value, Value]:
        """The even and the odd of 64 unsigned bytes, as 32 x i16 each."""
        words = self.bitcast(v, vec(i16, 32))
        even = self.builder.and_(words, self.splat_int(0xFF, i16, 32))
        return even, self.builder.lshr(words, self.splat_int(8, i16, 32))

    def _sign_extended(self, v: Value) -> tuple[Value, Value]:
        """The even and the odd of 64 signed bytes, as 32 x i16 each."""
        words, eight = self.bitcast(v, vec(i16, 32)), self.splat_int(8, i16, 32)
        return self.builder.ashr(self.builder.shl(words, eight), eight), self.builder.ashr(words, eight)

    def _multiply_add_pairs(self, a: Value, c: Value) -> Value:
        b, wide = self.builder, vec(i32, 32)
        products = b.mul(b.sext(a, wide), b.sext(c, wide))
        even, odd = range(0, 32, 2), range(1, 32, 2)
        return b.add(self.shuffle(products, products, even), self.shuffle(products, products, odd))

    # ---- AMX: eight tile registers of 16 rows x 64 bytes

    def tile_config(self) -> None:
        """Makes every tile 16 rows of 64 bytes; comes before any other tile operation of a kernel."""
        content = bytearray(64)  # palette; from byte 16 columns in bytes (u16); from byte 48 rows (u8)
        content[0], content[16:32], content[48:56] = 1, bytes([64, 0] * 8), bytes([16] * 8)
        kind = ir.ArrayType(i8, len(content))
        config = ir.GlobalVariable(self.builder.module, kind, "tile_config")
        config.linkage, config.global_constant, config.align = "internal", True, 64
        config.initializer = ir.Constant(kind, content)
        self._void("llvm.x86.ldtilecfg", config)

    def tile_release(self) -> None:
        """Gives the tile state back; the end of a kernel that used tiles."""
        self._void("llvm.x86.tilerelease")

    def tile_zero(self, tile: int) -> None:
        """Clears tile `tile` (a Python int, as in all tile operations)."""
        self._void("llvm.x86.tilezero", _tile(tile))

    def tile_load(self, tile: int, base: Value, stride: Value = None) -> None:
        """Loads 16 rows of 64 bytes, `stride` bytes (i64; default 64) apart."""
        self._void("llvm.x86.tileloadd64", _tile(tile), base, self.int64(64) if stride is None else stride)

    def tile_load_streamed(self, tile: int, base: Value) -> None:
        """Loads a tile from 1,024 consecutive bytes without keeping them in the first-level cache."""
        self._void("llvm.x86.tileloaddt164", _tile(tile), base, self.int64(64))

    def tile_store(self, tile: int, base: Value, stride: Value) -> None:
        """Stores 16 rows of 64 bytes, `stride` bytes (i64) apart."""
        self._void("llvm.x86.tilestored64", _tile(tile), base, stride)

    def tile_dot_bf16(self, acc: int, a: int, b: int) -> None:
        """Tile acc (16 x 16 f32) += a (16 x 32 bf16) times b (32 x 16 bf16, in pairs of rows)."""
        self._void("llvm.x86.tdpbf16ps", _tile(acc), _tile(a), _tile(b))

    # ---- LLVM intrinsics

    def _call(self, name: str, returns: Any, *arguments: Value) -> Value:
        module = self.builder.module
        function = module.globals.get(name)
        if function is None:
            kind = ir.FunctionType(returns, [argument.type for argument in arguments])
            function = ir.Function(module, kind, name)
        return self.builder.call(function, arguments)

    def _void(self, name: str, *arguments: Value) -> None:
        self._call(name, ir.VoidType(), *arguments)


def _halved(asm: Asm, pairs: Sequence[tuple[Value, Value]]) -> list[tuple[Value, Value]]:
    """Each 8-bit weight as the sum of two of 7 bits."""
    result = []
    for weight, activation in pairs:
        half = asm.bytes_shift(weight, 1, 0x7F)
        result += [(half, activation), (asm.builder.sub(weight, half), activation)]
    return result


def _less_128(asm: Asm, pairs: Sequence[tuple[Value, Value]]) -> list[tuple[Value, Value]]:
    """Each 8-bit weight as a signed one of 128 less, and 128 as twice 64."""
    flip, sixty_four = asm.splat_int(0x80, i8, 64), asm.splat_int(64, i8, 64)
    return [(asm.builder.xor(w, flip), x) for w, x in pairs] + [(sixty_four, x) for _, x in pairs] * 2


def _tile(n: int) -> Value:
    return ir.Constant(i8, n)


def _as_f32(x: float) -> float:
    """The nearest f32, as llvmlite refuses a constant that f32 cannot hold."""
    import struct

    return float(struct.unpack("f", struct.pack("f", x))[0])
