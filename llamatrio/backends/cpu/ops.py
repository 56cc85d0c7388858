"""Emitters of the small operations between the matrix products: norms, rotary embedding, activations, KV stores.

Every emitter takes an Asm and i64 values: addresses, counts (`n` is a number of f32 elements, a multiple of 16
unless stated), and f32 parameters passed as their bits (see `f32_bits`). Operands are f32 unless stated; a
result may overwrite its operand. The reference of each is the NumPy function of the same name in the tests.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from llvmlite import ir

from llamatrio.backends.cpu.vector import LANES, Asm, Value, f32, i32, vf32, vi8

F32 = 4
VECTOR = LANES * F32
"""Bytes of 16 f32."""
BLOCK = 32
"""Elements that share a scale, in q8_0 rows."""
MASKED = -1e30
"""A score or logit that weighs nothing: finite, so that it can be subtracted from itself."""


def f32_bits(x: float) -> int:
    """How a float is passed to a kernel."""
    return int(struct.unpack("<i", struct.pack("<f", x))[0])


def _float(a: Asm, bits: Value) -> Value:
    return a.bitcast(a.builder.trunc(bits, i32), f32)


def _splat_of(a: Asm, bits: Value) -> Value:
    return a.splat(_float(a, bits))


def _each_vector(a: Asm, n: Value, body: Callable[[Value], None]) -> None:
    """body(byte offset) for each 16 of n elements."""

    def one(i: Value, _: list[Value]) -> list[Value]:
        body(a.mul(i, F32))
        return []

    a.loop(0, n, [], one, step=LANES)


# ---- norms and sums


def _inverse_rms(a: Asm, x: Value, n: Value, eps_bits: Value) -> Value:
    """1 / sqrt(mean(x * x) + eps) in all lanes."""

    def squares(i: Value, sums: list[Value]) -> list[Value]:
        v = a.load(x, a.mul(i, F32), vf32)
        return [a.fma(v, v, sums[0])]

    (sums,) = a.loop(0, n, [a.zero(vf32)], squares, step=LANES)
    mean = a.fdiv(a.reduce_add(sums), a.to_f32(n))
    return a.splat(a.fdiv(a.float32(1.0), a.sqrt(a.fadd(mean, _float(a, eps_bits)))))


def rms_norm(a: Asm, x: Value, weight: Value, out: Value, n: Value, eps_bits: Value) -> None:
    """out = x / rms(x) * weight"""
    x, weight, out = a.pointer(x), a.pointer(weight), a.pointer(out)
    r = _inverse_rms(a, x, n, eps_bits)

    def body(o: Value) -> None:
        a.store(a.fmul(a.fmul(a.load(x, o, vf32), r), a.load(weight, o, vf32)), out, o)

    _each_vector(a, n, body)


def rms_norm_add(a: Asm, x: Value, y: Value, weight: Value, n: Value, eps_bits: Value) -> None:
    """x += y / rms(y) * weight"""
    x, y, weight = a.pointer(x), a.pointer(y), a.pointer(weight)
    r = _inverse_rms(a, y, n, eps_bits)

    def body(o: Value) -> None:
        normed = a.fmul(a.fmul(a.load(y, o, vf32), r), a.load(weight, o, vf32))
        a.store(a.fadd(a.load(x, o, vf32), normed), x, o)

    _each_vector(a, n, body)


def add(a: Asm, x: Value, y: Value, n: Value) -> None:
    """x += y"""
    x, y = a.pointer(x), a.pointer(y)
    _each_vector(a, n, lambda o: a.store(a.fadd(a.load(x, o, vf32), a.load(y, o, vf32)), x, o))


def scale(a: Asm, x: Value, n: Value, factor_bits: Value) -> None:
    """x *= factor"""
    x, factor = a.pointer(x), _splat_of(a, factor_bits)
    _each_vector(a, n, lambda o: a.store(a.fmul(a.load(x, o, vf32), factor), x, o))


def copy(a: Asm, x: Value, out: Value, n: Value) -> None:
    """out = x"""
    x, out = a.pointer(x), a.pointer(out)
    _each_vector(a, n, lambda o: a.store(a.load(x, o, vf32), out, o))


# ---- rotary embedding. `table` is one position's row: cos [n_dims / 2], then sin [n_dims / 2]


def rope_norm(a: Asm, x: Value, table: Value, n_dims: Value) -> None:
    """Rotates the pairs (2i, 2i + 1) of x [n_dims]; n_dims is even."""
    _rope(a, x, table, n_dims, adjacent=True)


def rope_neox(a: Asm, x: Value, table: Value, n_dims: Value) -> None:
    """Rotates the pairs (i, i + n_dims / 2) of x [n_dims]; n_dims is even."""
    _rope(a, x, table, n_dims, adjacent=False)


def _rope(a: Asm, x: Value, table: Value, n_dims: Value, *, adjacent: bool) -> None:
    x, table = a.pointer(x), a.pointer(table)
    n_pairs = a.div(n_dims, 2)
    half = a.mul(n_pairs, F32)
    n_whole = a.mul(a.div(n_pairs, LANES), LANES)

    def rotated(first: Value, second: Value, cos: Value, sin: Value) -> tuple[Value, Value]:
        return (
            a.fsub(a.fmul(first, cos), a.fmul(second, sin)),
            a.fadd(a.fmul(first, sin), a.fmul(second, cos)),
        )

    def vectors(i: Value, _: list[Value]) -> list[Value]:
        o = a.mul(i, F32)
        cos, sin = a.load(table, o, vf32), a.load(table, a.add(o, half), vf32)
        if adjacent:
            low, high = a.load(x, a.mul(o, 2), vf32), a.load(x, a.add(a.mul(o, 2), VECTOR), vf32)
            first, second = rotated(
                a.shuffle(low, high, range(0, 32, 2)), a.shuffle(low, high, range(1, 32, 2)), cos, sin
            )
            zipped = [lane + LANES * odd for lane in range(LANES) for odd in (0, 1)]
            a.store(a.shuffle(first, second, zipped[:LANES]), x, a.mul(o, 2))
            a.store(a.shuffle(first, second, zipped[LANES:]), x, a.add(a.mul(o, 2), VECTOR))
        else:
            first, second = rotated(a.load(x, o, vf32), a.load(x, a.add(o, half), vf32), cos, sin)
            a.store(first, x, o)
            a.store(second, x, a.add(o, half))
        return []

    def scalars(i: Value, _: list[Value]) -> list[Value]:
        o = a.mul(i, F32)
        at, behind = (a.mul(o, 2), a.add(a.mul(o, 2), F32)) if adjacent else (o, a.add(o, half))
        cos, sin = a.load(table, o, f32), a.load(table, a.add(o, half), f32)
        first, second = rotated(a.load(x, at, f32), a.load(x, behind, f32), cos, sin)
        a.store(first, x, at)
        a.store(second, x, behind)
        return []

    a.loop(0, n_whole, [], vectors, step=LANES)
    a.loop(n_whole, n_pairs, [], scalars)


# ---- keys of 8 bits, and the queries that meet them


def hadamard_blocks(a: Asm, x: Value, n: Value) -> None:
    """x = H x in each block of 32, where H is the Walsh-Hadamard matrix over sqrt(32). n is a multiple of 32.

    H is orthogonal and its own inverse, so queries and keys that both went through it have the same products. A
    dimension that is always large, as models have in their keys, is spread over the block that shares a scale.
    """
    x = a.pointer(x)

    def block(i: Value, _: list[Value]) -> list[Value]:
        o = a.mul(i, F32)
        low, high = a.load(x, o, vf32), a.load(x, a.add(o, VECTOR), vf32)
        for v, at in ((a.fadd(low, high), o), (a.fsub(low, high), a.add(o, VECTOR))):
            a.store(a.fmul(_hadamard_16(a, v), a.splat_f32(BLOCK**-0.5)), x, at)
        return []

    a.loop(0, n, [], block, step=BLOCK)


def _hadamard_16(a: Asm, v: Value) -> Value:
    """Sums and differences of lanes 8, 4, 2 and 1 apart."""
    for apart in (8, 4, 2, 1):
        signs = ir.Constant(vf32, [-1.0 if lane & apart else 1.0 for lane in range(LANES)])
        v = a.fma(v, signs, a.shuffle(v, v, [lane ^ apart for lane in range(LANES)]))
    return v


# ---- the feed-forward's gate


def silu_mul(a: Asm, gate: Value, up: Value, out: Value, n: Value) -> None:
    """out = silu(gate) * up"""
    gate, up, out = a.pointer(gate), a.pointer(up), a.pointer(out)

    def body(o: Value) -> None:
        g = a.load(gate, o, vf32)
        a.store(a.fmul(_sigmoid_product(a, g, g), a.load(up, o, vf32)), out, o)

    _each_vector(a, n, body)


def gelu_mul(a: Asm, gate: Value, up: Value, out: Value, n: Value) -> None:
    """out = gelu(gate) * up, gelu in its tanh form.

    g / 2 (1 + tanh(u)) = g sigmoid(2 u), with u = sqrt(2 / pi) (g + 0.044715 g^3).
    """
    gate, up, out = a.pointer(gate), a.pointer(up), a.pointer(out)
    linear, cubic = 2 * 0.7978845608028654, 2 * 0.7978845608028654 * 0.044715

    def body(o: Value) -> None:
        g = a.load(gate, o, vf32)
        doubled = a.fmul(g, a.fma(a.fmul(g, g), a.splat_f32(cubic), a.splat_f32(linear)))
        a.store(a.fmul(_sigmoid_product(a, g, doubled), a.load(up, o, vf32)), out, o)

    _each_vector(a, n, body)


def _sigmoid_product(a: Asm, x: Value, z: Value) -> Value:
    """x * sigmoid(z)"""
    return a.fdiv(x, a.fadd(a.splat_f32(1.0), a.exp(a.fneg(z))))


# ---- KV rows


def store_f16(a: Asm, x: Value, out: Value, n: Value) -> None:
    """out (f16 [n]) = x"""
    x, out = a.pointer(x), a.pointer(out)

    def one(i: Value, _: list[Value]) -> list[Value]:
        a.store_f16(a.load(x, a.mul(i, F32), vf32), out, a.mul(i, 2))
        return []

    a.loop(0, n, [], one, step=LANES)


def store_q8_k(a: Asm, x: Value, out: Value, scales: Value, n: Value) -> None:
    """x in blocks of 32: out (u8 [n]) = 128 + rint(x / scale), scales (f16 [n / 32]). n is a multiple of 32.

    Unsigned, because the products of attention take the unsigned operand from the cells.
    """
    _store_q8(a, x, out, scales, n, bias=128)


def store_q8_v(a: Asm, x: Value, out: Value, scales: Value, n: Value) -> None:
    """x in blocks of 32: out (i8 [n]) = rint(x / scale), scales (f16 [n / 32]). n is a multiple of 32."""
    _store_q8(a, x, out, scales, n, bias=0)


def _store_q8(a: Asm, x: Value, out: Value, scales: Value, n: Value, *, bias: int) -> None:
    x, out, scales = a.pointer(x), a.pointer(out), a.pointer(scales)

    def one(i: Value, _: list[Value]) -> list[Value]:
        low, high = a.load(x, a.mul(i, F32), vf32), a.load(x, a.add(a.mul(i, F32), VECTOR), vf32)
        largest = a.splat(a.reduce_max(a.fmax(a.fabs(low), a.fabs(high))))
        # Quantize by the scale as it will be read back; below f16's range it is 0 and so is the block.
        half = a.f32_to_f16(a.fmul(largest, a.splat_f32(1 / 127)))
        step = a.f16_to_f32(half)
        nonzero = a.builder.fcmp_ordered(">", step, a.zero(vf32))
        inverse = a.select(nonzero, a.fdiv(a.splat_f32(1.0), step), a.zero(vf32))
        for v, o in ((low, i), (high, a.add(i, LANES))):
            q = a.builder.add(a.round_to_int(_clamp(a, a.fmul(v, inverse), 127.0)), a.splat_int(bias))
            a.store(a.builder.trunc(q, vi8), out, o)
        a.store(a.lane(half, 0), scales, a.div(i, BLOCK // 2))
        return []

    a.loop(0, n, [], one, step=BLOCK)


def _clamp(a: Asm, v: Value, limit: float) -> Value:
    return a.fmin(a.fmax(v, a.splat_f32(-limit)), a.splat_f32(limit))


# ---- logits


def soft_cap(a: Asm, x: Value, n: Value, cap_bits: Value) -> None:
    """x = cap * tanh(x / cap)"""
    x, cap = a.pointer(x), _splat_of(a, cap_bits)
    _each_vector(a, n, lambda o: a.store(capped(a, a.load(x, o, vf32), cap), x, o))


def capped(a: Asm, v: Value, cap: Value) -> Value:
    """cap * tanh(v / cap), by tanh(z) = 1 - 2 / (e^2z + 1)"""
    e = a.exp(a.fdiv(a.fmul(a.splat_f32(2.0), v), cap))
    one = a.splat_f32(1.0)
    return a.fmul(cap, a.fsub(one, a.fdiv(a.splat_f32(2.0), a.fadd(e, one))))


def block_maxima(a: Asm, x: Value, n: Value, maxima: Value) -> None:
    """maxima (f32 [n / 64]): largest of each 64. n is a multiple of 64."""
    x, maxima = a.pointer(x), a.pointer(maxima)

    def block(i: Value, _: list[Value]) -> list[Value]:
        _store_maximum(a, x, i, maxima)
        return []

    a.loop(0, n, [], block, step=64)


def _store_maximum(a: Asm, x: Value, i: Value, maxima: Value) -> Value:
    """Stores the largest of the 64 from x[i] on; returns the largest of each 4 vectors' lanes."""
    o = a.mul(i, F32)
    v = [a.load(x, a.add(o, VECTOR * j), vf32) for j in range(4)]
    largest = a.fmax(a.fmax(v[0], v[1]), a.fmax(v[2], v[3]))
    a.store(a.reduce_max(largest), maxima, a.div(o, 64))
    return largest


def scan_logits(a: Asm, x: Value, n: Value, maxima: Value, segment: Value) -> None:
    """maxima (f32 [n / 64]): largest of each 64. segment (f32 [2]): largest of all, sum of exp(x - largest).

    n is a multiple of 64, above 0.
    """
    x, maxima, segment = a.pointer(x), a.pointer(maxima), a.pointer(segment)

    def block(i: Value, carried: list[Value]) -> list[Value]:
        return [a.fmax(carried[0], _store_maximum(a, x, i, maxima))]

    (largest,) = a.loop(0, n, [a.splat_f32(MASKED)], block, step=64)
    top = a.reduce_max(largest)
    shift = a.splat(top)

    def sums(i: Value, carried: list[Value]) -> list[Value]:
        return [a.fadd(carried[0], a.exp(a.fsub(a.load(x, a.mul(i, F32), vf32), shift)))]

    (total,) = a.loop(0, n, [a.zero(vf32)], sums, step=LANES)
    a.store(top, segment, 0)
    a.store(a.reduce_add(total), segment, F32)
