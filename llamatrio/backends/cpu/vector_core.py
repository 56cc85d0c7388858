"""The assembler's base: constants, memory, integers for addresses, control flow, and lanes."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from llamatrio.backends.cpu.levels import Level
from llamatrio.backends.cpu.vector_types import LANES, Near, Offset, Value, f32, i8, i32, i64, pointer, vec, vf32


class Core:
    """What every kernel needs."""

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

    def load_first(self, base: Value, offset: Offset, n: Value, other: Value) -> Value:
        """16 x i32 from base + offset bytes, of which only the first n are read; the rest are `other`."""
        lanes = ir.Constant(vec(i32), list(range(LANES)))
        inside = self.builder.icmp_signed("<", lanes, self.splat(self.builder.trunc(n, i32)))
        arguments = (self.at(base, offset), self.int32(4), inside, self.splat(other))
        return self._call("llvm.masked.load.v16i32.p0", vec(i32), *arguments)

    def load_shared(self, base: Value, offset: Offset, kind: Any) -> Value:
        """Loads an integer that another thread may be writing: once, and never an earlier value again."""
        return self.builder.load_atomic(self.at(base, offset), "monotonic", kind.width // 8, typ=kind)

    def store(self, value: Value, base: Value, offset: Offset, align: int = 1) -> None:
        """Stores to base + offset bytes."""
        self.builder.store(value, self.at(base, offset), align=align)

    def load_splat(self, base: Value, offset: Offset, element: Any = f32) -> Value:
        """Loads one 32-bit element into all 16 lanes."""
        return self.splat(self.load(base, offset, element))

    def prefetch(self, base: Value, offset: Offset, into: Near = "L2") -> None:
        """Asks for the cache line at base + offset; any address is allowed."""
        locality = {"L1": 3, "L2": 2, "past": 0}[into]
        self._void("llvm.prefetch.p0", self.at(base, offset), self.int32(0), self.int32(locality), self.int32(1))

    def prefetch_lines(self, base: Value, offset: Offset, n_bytes: int, into: Near = "L2") -> None:
        """Asks for n_bytes (a Python int) from base + offset on."""
        for line in range(0, n_bytes, 64):
            self.prefetch(base, self.add(offset, line), into)

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

    def to_f32(self, v: Value) -> Value:
        """Signed integers to f32, lane by lane."""
        return self.builder.sitofp(v, vec(f32, v.type.count) if isinstance(v.type, ir.VectorType) else f32)

    def call(self, address: Value, *arguments: Value) -> None:
        """Calls the C function at `address` (i64); what it returns is dropped."""
        kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
        self.builder.call(self.builder.inttoptr(address, kind.as_pointer()), arguments)

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


def _as_f32(x: float) -> float:
    """The nearest f32, as llvmlite refuses a constant that f32 cannot hold."""
    return float(struct.unpack("f", struct.pack("f", x))[0])
