"""Attention states: what a chunk of cells leaves per query head, to be merged in order of position.

state   state_bytes(head_dim): f32 [head_dim] unnormalised output, then the largest score, then the sum of weights
"""

from __future__ import annotations

from collections.abc import Callable

from llamatrio.backends.cpu.ops import F32, VECTOR
from llamatrio.backends.cpu.vector import LANES, Asm, Value, vf32


def state_bytes(head_dim: int) -> int:
    """Bytes of one head's state."""
    return F32 * head_dim + VECTOR


def merge_states(head_dim: int) -> Callable[[Asm, Value, Value, Value], None]:
    """Emitter of (state, other, n): folds the states of n heads for later positions into those for earlier ones."""

    def emit(a: Asm, state: Value, other: Value, n: Value) -> None:
        state, other = a.pointer(state), a.pointer(other)

        def head(h: Value, _: list[Value]) -> list[Value]:
            base = a.mul(h, state_bytes(head_dim))
            largest_at, sum_at = a.add(base, F32 * head_dim), a.add(base, F32 * head_dim + F32)
            first, second = a.load_splat(state, largest_at), a.load_splat(other, largest_at)
            largest = a.fmax(first, second)
            keep, take = a.exp(a.fsub(first, largest)), a.exp(a.fsub(second, largest))

            def merged(x: Value, y: Value) -> Value:
                return a.fma(y, take, a.fmul(x, keep))

            for d in range(head_dim // LANES):
                at = a.add(base, VECTOR * d)
                a.store(merged(a.load(state, at, vf32), a.load(other, at, vf32)), state, at)
            total = merged(a.load_splat(state, sum_at), a.load_splat(other, sum_at))
            a.store(a.lane(total, 0), state, sum_at)
            a.store(a.lane(largest, 0), state, largest_at)
            return []

        a.loop(0, n, [], head)

    return emit


def finish_states(head_dim: int) -> Callable[[Asm, Value, Value, Value], None]:
    """Emitter of (state, out, n): the states of n heads as attention outputs f32 [n][head_dim]."""

    def emit(a: Asm, state: Value, out: Value, n: Value) -> None:
        state, out = a.pointer(state), a.pointer(out)

        def head(h: Value, _: list[Value]) -> list[Value]:
            base = a.mul(h, state_bytes(head_dim))
            inverse = a.fdiv(a.splat_f32(1.0), a.load_splat(state, a.add(base, F32 * head_dim + F32)))
            for d in range(head_dim // LANES):
                value = a.load(state, a.add(base, VECTOR * d), vf32)
                a.store(a.fmul(value, inverse), out, a.add(a.mul(h, F32 * head_dim), VECTOR * d))
            return []

        a.loop(0, n, [], head)

    return emit
