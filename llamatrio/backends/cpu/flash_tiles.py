"""Tiles, and their products: on AMX where there is one, else in vector registers.

A product is 16 x 16 f32 += left [16][32] x right [32][16]. The elements are bf16 where the processor multiplies these
(two at a time, in the layout that AMX asks for), else f32:

            bf16, a tile is 1,024 bytes             f32, a tile is 2,048 bytes
    left    16 rows of 32 elements                  16 rows of 32 elements
    right   16 rows of 16 pairs, (2 p, 2 p + 1)     32 rows of 16 elements

Either way a row of `right` is a vector, and it meets 32 bits of each row of `left`. So in vector registers, which hold
a row of the result each, a product is 16 multiply-adds of a vector and a broadcast for each row of `right`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from llamatrio.backends.cpu.levels import Level
from llamatrio.backends.cpu.vector import LANES, Asm, Offset, Value, i32, vf32, vi32

TILE_ROWS, TILE_DIMS = 16, 32
MOST_TILE_BYTES = 4 * TILE_ROWS * TILE_DIMS
RESULT_BYTES = 4 * TILE_ROWS * LANES
MOST_RESULTS = 4
"""Results that may be asked for at once: AMX has eight tiles in all."""
_VECTOR = 64
_UNROLLED = 4
"""Rows of `right` in one turn of the loop."""


class Tiles:
    """How tiles are laid out and multiplied at a level."""

    def __init__(self, level: Level) -> None:
        self.has_amx, self.is_bf16 = level.has_amx, level.has_bf16
        self.n_accumulators = min(TILE_ROWS, level.n_vectors // 2)

    @property
    def n_bytes(self) -> int:
        """Bytes of a tile."""
        return (2 if self.is_bf16 else 4) * TILE_ROWS * TILE_DIMS

    # ---- layouts

    def store_row(self, a: Asm, low: Value, high: Value, base: Value, row: Value) -> None:
        """Row `row` (i64) of a left tile from its 32 elements, as 2 x 16 f32."""
        if self.is_bf16:
            a.store(_bf16_row(a, low, high), base, a.mul(row, _VECTOR))
        else:
            a.store(low, base, a.mul(row, 2 * _VECTOR))
            a.store(high, base, a.add(a.mul(row, 2 * _VECTOR), _VECTOR))

    def store_columns(self, a: Asm, columns: Sequence[Value], base: Value, offset: Offset) -> None:
        """A left tile from its 32 columns of 16 x f32."""
        if self.is_bf16:
            pairs = [a.bf16_pairs(columns[2 * p], columns[2 * p + 1]) for p in range(LANES)]
            for i, row in enumerate(transpose(a, pairs)):
                a.store(row, base, a.add(offset, _VECTOR * i))
            return
        for half in range(2):
            for i, row in enumerate(transpose(a, columns[LANES * half : LANES * (half + 1)])):
                a.store(row, base, a.add(offset, 2 * _VECTOR * i + _VECTOR * half))

    def store_transposed(self, a: Asm, rows: Sequence[tuple[Value, Value]], base: Value, offset: Offset) -> None:
        """A right tile from its 16 columns of 32 elements, as 2 x 16 f32 each."""
        if self.is_bf16:
            vectors = transpose(a, [_bf16_row(a, low, high) for low, high in rows])
        else:
            vectors = transpose(a, [low for low, _ in rows]) + transpose(a, [high for _, high in rows])
        for i, vector in enumerate(vectors):
            a.store(vector, base, a.add(offset, _VECTOR * i))

    def store_pair(self, a: Asm, even: Value, odd: Value, base: Value, row: Value) -> None:
        """The rows `row` (i64, even) and `row` + 1 of right tiles that lie one behind another."""
        if self.is_bf16:
            a.store(a.bf16_pairs(even, odd), base, a.mul(row, _VECTOR // 2))
        else:
            a.store(even, base, a.mul(row, _VECTOR))
            a.store(odd, base, a.add(a.mul(row, _VECTOR), _VECTOR))

    # ---- products

    def begin(self, a: Asm) -> None:
        """Comes before the first product of a kernel."""
        if self.has_amx:
            a.tile_config()

    def end(self, a: Asm) -> None:
        """Comes behind the last product of a kernel."""
        if self.has_amx:
            a.tile_release()

    def multiply(
        self,
        a: Asm,
        n_results: int,
        n_steps: int | Value,
        left: Callable[[int, Offset], Value],
        right: Callable[[Offset], Value],
        result: Callable[[int], Value],
    ) -> None:
        """Results i < n_results <= MOST_RESULTS, f32 [16][16]: the sums over the steps of left(i, step) x right(step).

        The callables give addresses. An int of steps is unrolled where that costs little.
        """
        if self.has_amx:
            _multiply_on_amx(a, n_results, n_steps, left, right, result)
            return
        for i in range(n_results):
            for first in range(0, TILE_ROWS, self.n_accumulators):
                self._multiply_rows(a, n_steps, partial(left, i), right, result(i), first)

    def _multiply_rows(
        self,
        a: Asm,
        n_steps: int | Value,
        left: Callable[[Offset], Value],
        right: Callable[[Offset], Value],
        result: Value,
        first: int,
    ) -> None:
        """The rows of one result from `first` on, as many as there are accumulators."""
        row_bytes = self.n_bytes // TILE_ROWS

        def step(s: Value, sums: list[Value]) -> list[Value]:
            rows, vectors = left(s), right(s)

            def some(p: Value, sums: list[Value]) -> list[Value]:
                sums = list(sums)
                for u in range(_UNROLLED):
                    vector = a.load(vectors, a.add(a.mul(p, _VECTOR), _VECTOR * u), vi32)
                    for r, total in enumerate(sums):
                        at = a.add(a.mul(p, 4), 4 * u + (first + r) * row_bytes)
                        sums[r] = self._multiply_add(a, vector, a.load_splat(rows, at, i32), total)
                return sums

            return a.loop(0, self.n_bytes // _VECTOR, sums, some, step=_UNROLLED)

        sums = a.loop(0, n_steps, [a.zero(vf32)] * self.n_accumulators, step)
        for r, total in enumerate(sums):
            a.store(total, result, _VECTOR * (first + r))

    def _multiply_add(self, a: Asm, x: Value, y: Value, total: Value) -> Value:
        if self.is_bf16:
            return a.dot_bf16(x, y, total)
        return a.fma(a.bitcast(x, vf32), a.bitcast(y, vf32), total)


def _multiply_on_amx(
    a: Asm,
    n_results: int,
    n_steps: int | Value,
    left: Callable[[int, Offset], Value],
    right: Callable[[Offset], Value],
    result: Callable[[int], Value],
) -> None:
    """Tiles 0 .. 3: results; 4: right; 5 .. 7: left, in turn. Between tile_config and tile_release."""
    for i in range(n_results):
        a.tile_zero(i)

    def step(s: Offset, _: list[Value]) -> list[Value]:
        a.tile_load(4, right(s))
        for i in range(n_results):
            a.tile_load(5 + i % 3, left(i, s))
            a.tile_dot_bf16(i, 5 + i % 3, 4)
        return []

    if isinstance(n_steps, int):
        for s in range(n_steps):
            step(s, [])
    else:
        a.loop(0, n_steps, [], step)
    for i in range(n_results):
        a.tile_store(i, result(i), a.int64(_VECTOR))


def _bf16_row(a: Asm, low: Value, high: Value) -> Value:
    """32 consecutive values as 32 bf16, in a vector of 16 x 32 bits."""
    return a.bitcast(a.concat([a.f32_to_bf16(low), a.f32_to_bf16(high)]), vi32)


def transpose(a: Asm, rows: Sequence[Value]) -> list[Value]:
    """The columns of a 16 x 16 matrix of 32-bit elements given by its rows."""

    def paired(vectors: Sequence[Value], distance: int, low: Sequence[int], high: Sequence[int]) -> list[Value]:
        out: list[Value] = [None] * LANES
        for i in range(LANES):
            if not i & distance:
                out[i] = a.shuffle(vectors[i], vectors[i + distance], low)
                out[i + distance] = a.shuffle(vectors[i], vectors[i + distance], high)
        return out

    def in_quarters(*picks: int) -> list[int]:
        return [pick + quarter for quarter in range(0, LANES, 4) for pick in picks]

    def of_quarters(*quarters: int) -> list[int]:
        return [4 * quarter + lane for quarter in quarters for lane in range(4)]

    step = paired(rows, 1, in_quarters(0, 16, 1, 17), in_quarters(2, 18, 3, 19))
    step = paired(step, 2, in_quarters(0, 1, 16, 17), in_quarters(2, 3, 18, 19))
    step = paired(step, 4, of_quarters(0, 1, 4, 5), of_quarters(2, 3, 6, 7))
    step = paired(step, 8, of_quarters(0, 2, 4, 6), of_quarters(1, 3, 5, 7))
    # Where each column has come to rest.
    return [step[_place_of_column(column)] for column in range(LANES)]


def _place_of_column(column: int) -> int:
    """Bits of the column: quarter (2), place in the quarter (2). The stages chose by place bit 1, 0, then quarter."""
    quarter, place = column >> 2, column & 3
    return (quarter & 1) << 3 | (quarter >> 1) << 2 | (place & 1) << 1 | place >> 1
