"""Vectors of 64 bytes: fields, tables, and the integer dot products that differ most between levels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from llvmlite import ir

from llamatrio.backends.cpu.vector_core import Core
from llamatrio.backends.cpu.vector_types import Value, i1, i8, i16, i32, vbytes, vec, vi32


class _ByteLookup(NamedTuple):
    """An instruction that looks each byte up in a table of 16: both operands are `width` bytes."""

    name: str
    width: int


_BYTE_LOOKUPS = {
    "vnni": _ByteLookup("llvm.x86.avx512.pshuf.b.512", 64),
    "maddubs": _ByteLookup("llvm.x86.avx2.pshuf.b", 32),
    "sdot": _ByteLookup("llvm.aarch64.neon.tbl1.v16i8", 16),
}


class ByteOps(Core):
    """16 lanes of 4 bytes."""

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


def _halved(asm: ByteOps, pairs: Sequence[tuple[Value, Value]]) -> list[tuple[Value, Value]]:
    """Each 8-bit weight as the sum of two of 7 bits."""
    result = []
    for weight, activation in pairs:
        half = asm.bytes_shift(weight, 1, 0x7F)
        result += [(half, activation), (asm.builder.sub(weight, half), activation)]
    return result


def _less_128(asm: ByteOps, pairs: Sequence[tuple[Value, Value]]) -> list[tuple[Value, Value]]:
    """Each 8-bit weight as a signed one of 128 less, and 128 as twice 64."""
    flip, sixty_four = asm.splat_int(0x80, i8, 64), asm.splat_int(64, i8, 64)
    return [(asm.builder.xor(w, flip), x) for w, x in pairs] + [(sixty_four, x) for _, x in pairs] * 2
