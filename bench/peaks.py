"""What the machine can do at best, as kernels that do nothing else: read memory, and multiply in registers.

A multiplying kernel has as many independent sums under way as the registers hold, so that the units never wait for a
result. Its factors come from `seed` (2 KiB) and change from turn to turn, or the compiler would take the products
out of the loop; what it sums goes to `sink`, or there would be no loop at all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from llamatrio.backends.cpu.compile import Emit, compile_kernel
from llamatrio.backends.cpu.levels import Level
from llamatrio.backends.cpu.rows import PREFETCH
from llamatrio.backends.cpu.vector import LANES, Asm, Value, vbytes, vf32, vi32

_VERSION = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]
"""Part of the kernels' names: the cache of compiled ones knows the package's sources, not this file."""
_CHAIN = 8
"""Integer products that are added up before the sum is."""


class Peak(NamedTuple):
    """A kernel (seed, turns, sink), and the operations of one turn; a multiplication and an addition are two."""

    kernel: int
    operations: int


def read_kernel(level: Level) -> int:
    """Kernel (source, n_bytes, sink): reads, with the prefetch of the rows kernels. n_bytes a multiple of 512."""

    def emit(asm: Asm, source: Value, n_bytes: Value, sink: Value) -> None:
        start = asm.pointer(source)

        def step(at: Value, sums: list[Value]) -> list[Value]:
            for line in range(8):
                asm.prefetch(start, asm.add(at, PREFETCH + 64 * line))
            return [asm.builder.xor(total, asm.load(start, asm.add(at, 64 * n), vi32)) for n, total in enumerate(sums)]

        sums = asm.loop(0, n_bytes, [asm.zero(vi32)] * 8, step, step=512)
        total = sums[0]
        for other in sums[1:]:
            total = asm.builder.xor(total, other)
        asm.store(total, asm.pointer(sink), 0)

    return _compile("bench_read", emit, level)


def _compile(name: str, emit: Emit, level: Level) -> int:
    return compile_kernel(f"{name}_{_VERSION}", emit, level)


def int8_peak(level: Level) -> Peak:
    """Products of 4-bit weights and signed bytes, as the rows kernels multiply."""
    n = _n_sums(level)

    def turn(asm: Asm, seed: Value, sums: list[Value], x: Value) -> list[Value]:
        dots = [asm.dot(_weights(asm, seed, i), [x] * _CHAIN, 4) for i in range(n)]
        return [asm.builder.add(total, dot) for total, dot in zip(sums, dots, strict=True)]

    return Peak(_compile("bench_int8", _sums(turn, n, vi32, vbytes), level), n * _CHAIN * 64 * 2)


def _weights(asm: Asm, seed: Value, i: int) -> list[Value]:
    """The factors of a chain. Where sum and product are one instruction, equal ones are products of their own."""
    same = asm.level.dot == "vnni"
    return [asm.load(seed, 64 * (i if same else i * _CHAIN + j), vbytes) for j in range(_CHAIN)]


def f32_peak(level: Level) -> Peak:
    """Fused multiply-add of f32, as the rows kernels of F32, F16 and BF16 multiply."""
    n = _n_sums(level)

    def turn(asm: Asm, seed: Value, sums: list[Value], x: Value) -> list[Value]:
        return [asm.fma(total, asm.bitcast(x, vf32), total) for total in sums]

    return Peak(_compile("bench_f32", _sums(turn, n, vf32, vi32), level), n * LANES * 2)


def tile_peak(level: Level) -> Peak:
    """AMX: four tiles of sums, as the panel kernels multiply. Only where has_amx."""

    def emit(asm: Asm, seed: Value, turns: Value, sink: Value) -> None:
        asm.tile_config()
        for tile in range(8):
            asm.tile_zero(tile)

        def turn(_: Value, __: list[Value]) -> list[Value]:
            for total, left, right in ((0, 4, 6), (1, 4, 7), (2, 5, 6), (3, 5, 7)):
                asm.tile_dot_bf16(total, left, right)
            return []

        asm.loop(0, turns, [], turn)
        asm.tile_release()

    return Peak(_compile("bench_tiles", emit, level), 4 * 16 * 16 * 32 * 2)


def _n_sums(level: Level) -> int:
    return max(2, level.n_vectors * 3 // 8)


def _sums(turn: Callable[[Asm, Value, list[Value], Value], list[Value]], n: int, kind: object, factors: object) -> Emit:
    """A kernel that takes `turns` turns at n sums of `kind`; x, of `factors`, counts the turns."""

    def emit(asm: Asm, seed: Value, turns: Value, sink: Value) -> None:
        start = asm.pointer(seed)
        one = asm.bitcast(asm.splat_int(1), factors)

        def once(_: Value, carried: list[Value]) -> list[Value]:
            *sums, x = carried
            return [*turn(asm, start, sums, x), asm.builder.add(x, one)]

        first = [asm.bitcast(asm.load(start, 64 * i, vi32), kind) for i in range(n)]
        *sums, _ = asm.loop(0, turns, [*first, asm.load(start, 0, factors)], once)
        for i, total in enumerate(sums):
            asm.store(total, asm.pointer(sink), 64 * i)

    return emit
