"""Attention of many consecutive rows of one sequence at once, on tiles (flash_tiles.py).

Theory of operation. A *query tile* is 16 rows of one query head, one per lane: scores, largest score and sum of
weights are vectors over rows, so the softmax needs no sum across lanes. For each CHUNK of positions (at multiples of
CHUNK, so that a row's bits depend on its own position alone) the cells of a kv head are collected once, as tiles, and
then every query tile that sees them does

    scores   S [cells][16]     = K [cells][head_dim] x Q [head_dim][16]          tiles
    weights  P [cells][16]     = 2 ** (S - largest), 0 where hidden              vectors
    output   O [head_dim][16]  = O * 2 ** (old largest - largest) + V [head_dim][cells] x P    tiles

K and V are left tiles, Q and P right ones:

    queries   [n_heads][n_tiles][head_dim / 32] right tiles: 32 dims x 16 rows
    packed    K [CHUNK / 16][head_dim / 32] left tiles: 16 cells x 32 dims, then
              V [CHUNK / 32][head_dim / 16] left tiles: 16 dims x 32 cells
    states    [n_heads][n_tiles] of tile_state_bytes: O f32 [head_dim][16], largest [16], sum [16]

Scores are in units of ln 2 (log2 e is multiplied into the query, or after the soft cap), which saves the exponential
a product and half of its range reduction; its error of 3e-6 is below what the cache itself has lost.

Lanes past the last row of a span compute what nobody reads. A lane to which a whole chunk is hidden keeps its state:
its weights are 0 and its factor is 1; before its first visible cell it gathers garbage, which the factor 0 then clears.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from llvmlite import ir

from llamatrio.backends.cpu.flash_tiles import (
    MOST_RESULTS,
    MOST_TILE_BYTES,
    RESULT_BYTES,
    TILE_DIMS,
    TILE_ROWS,
    Tiles,
    transpose,
)
from llamatrio.backends.cpu.kv_rows import CHUNK, AttentionShape, Rows
from llamatrio.backends.cpu.ops import F32, MASKED, VECTOR, capped
from llamatrio.backends.cpu.vector import LANES, Asm, Offset, Value, f32, i32, vf32, vi32

LOG2_E = 1.4426950408889634
_EXP2 = [math.log(2) ** n / math.factorial(n) for n in range(6)]


def has_flash(shape: AttentionShape) -> bool:
    """Whether these kernels exist for heads of this shape."""
    return shape.head_dim % TILE_DIMS == 0


def most_span_rows(group: int) -> int:
    """Rows taken at once: the more, the fewer times cells are collected; the states should stay in cache."""
    return 128 if group <= 4 else 64


def tile_state_bytes(head_dim: int) -> int:
    """Bytes of the state of one query tile."""
    return VECTOR * (head_dim + 2)


def queries_bytes(head_dim: int, group: int) -> int:
    """Bytes of the queries of a span, at any level (as all sizes here)."""
    return group * most_span_rows(group) // LANES * (head_dim // TILE_DIMS) * MOST_TILE_BYTES


def states_bytes(head_dim: int, group: int) -> int:
    """Bytes of the states of a span."""
    return group * most_span_rows(group) // LANES * tile_state_bytes(head_dim)


def packed_bytes(head_dim: int) -> int:
    """Bytes of a chunk's cells."""
    return 2 * CHUNK * head_dim * 4


def scores_bytes() -> int:
    """Bytes of scratch of flash_chunk: scores, weights, and an output before it is merged."""
    return 2 * VECTOR * CHUNK + MOST_RESULTS * RESULT_BYTES


def flash_begin(shape: AttentionShape) -> Callable[..., None]:
    """Emitter of (q, row_stride, n_rows, n_heads, n_tiles, queries, states).

    q: f32 heads, scaled; row r of head h at q + r * row_stride + h * 4 * head_dim. Packs them and clears the states.
    """
    head_dim, n_steps = shape.head_dim, shape.head_dim // TILE_DIMS

    def emit(
        a: Asm,
        q: Value,
        row_stride: Value,
        n_rows: Value,
        n_heads: Value,
        n_tiles: Value,
        queries: Value,
        states: Value,
    ) -> None:
        source, target, states = a.pointer(q), a.pointer(queries), a.pointer(states)
        tiles, last = Tiles(a.level), a.add(n_rows, -1)

        def tile(t: Value, _: list[Value]) -> list[Value]:
            head, place = a.builder.udiv(t, n_tiles), a.builder.urem(t, n_tiles)
            rows = [
                a.at(
                    source,
                    a.add(
                        a.mul(a.minimum(a.add(a.mul(place, LANES), j), last), row_stride),
                        a.mul(head, F32 * head_dim),
                    ),
                )
                for j in range(LANES)
            ]

            def step(s: Value, _: list[Value]) -> list[Value]:
                at = a.mul(s, F32 * TILE_DIMS)
                columns = [_query(a, shape, row, at) for row in rows]
                tiles.store_transposed(a, columns, target, a.mul(a.add(a.mul(t, n_steps), s), tiles.n_bytes))
                return []

            a.loop(0, n_steps, [], step)
            state = a.mul(t, tile_state_bytes(head_dim))

            def clear(d: Value, _: list[Value]) -> list[Value]:
                a.store(a.zero(vf32), states, a.add(state, a.mul(d, VECTOR)))
                return []

            a.loop(0, head_dim, [], clear)
            a.store(a.splat_f32(MASKED), states, a.add(state, VECTOR * head_dim))
            a.store(a.zero(vf32), states, a.add(state, VECTOR * (head_dim + 1)))
            return []

        a.loop(0, a.mul(n_heads, n_tiles), [], tile)

    return emit


def _query(a: Asm, shape: AttentionShape, row: Value, at: Value) -> tuple[Value, Value]:
    """32 elements of a query, in units of ln 2 where no soft cap comes between."""
    low, high = a.load(row, at, vf32), a.load(row, a.add(at, VECTOR), vf32)
    if shape.has_softcap:
        return low, high
    return a.fmul(low, a.splat_f32(LOG2_E)), a.fmul(high, a.splat_f32(LOG2_E))


def _exp2(a: Asm, x: Value) -> Value:
    """2 ** x for x <= 0, exactly 1 at 0 and exactly 0 from -127 down: Taylor's polynomial for |fraction| <= 1 / 2."""
    x = a.fmax(x, a.splat_f32(-127.0))
    n = a.round_to_int(x)
    f = a.fsub(x, a.to_f32(n))
    p = a.splat_f32(_EXP2[-1])
    for coefficient in reversed(_EXP2[:-1]):
        p = a.fma(p, f, a.splat_f32(coefficient))
    return a.bitcast(a.builder.add(a.bitcast(p, vi32), a.builder.shl(n, a.splat_int(23))), vf32)


def flash_pack(shape: AttentionShape) -> Callable[..., None]:
    """Emitter of (k, v, cells, n, head, packed, next_n): collects a chunk of 1 <= n <= CHUNK cells.

    Cells n .. rounded up to 32 repeat the last one. The next_n <= CHUNK cells behind these are prefetched.
    """
    head_dim = shape.head_dim
    n_steps, n_vectors = head_dim // TILE_DIMS, head_dim // LANES

    def emit(
        a: Asm,
        k: Value,
        v: Value,
        cells: Value,
        n: Value,
        head: Value,
        packed: Value,
        next_n: Value,
    ) -> None:
        cells, packed = a.pointer(cells), a.pointer(packed)
        k_rows = Rows(a, shape, shape.type_k, a.pointer(k), cells, head)
        v_rows = Rows(a, shape, shape.type_v, a.pointer(v), cells, head)
        tiles = Tiles(a.level)
        values = a.at(packed, _keys_bytes(tiles, head_dim))
        last = a.add(n, -1)
        furthest = a.add(n, next_n, -1)

        def key(i: Value, _: list[Value]) -> list[Value]:
            place, ahead = a.minimum(i, last), a.minimum(a.add(i, CHUNK), furthest)
            k_rows.prefetch(ahead)
            v_rows.prefetch(ahead)
            first = a.mul(a.div(i, TILE_ROWS), n_steps * tiles.n_bytes)
            row = a.builder.and_(i, a.int64(TILE_ROWS - 1))
            vectors = k_rows.values(place, bias=128)
            for s in range(n_steps):
                tile = a.at(packed, a.add(first, tiles.n_bytes * s))
                tiles.store_row(a, vectors[2 * s], vectors[2 * s + 1], tile, row)
            return []

        def block(b: Value, _: list[Value]) -> list[Value]:
            places = [a.minimum(a.add(a.mul(b, 32), j), last) for j in range(32)]
            for d in range(n_vectors):
                columns = [v_rows.value(place, d, bias=0) for place in places]
                tiles.store_columns(a, columns, values, a.mul(a.add(a.mul(b, n_vectors), d), tiles.n_bytes))
            return []

        n_blocks = a.div(a.add(n, 31), 32)
        a.loop(0, a.mul(n_blocks, 32), [], key)
        a.loop(0, n_blocks, [], block)

    return emit


def flash_chunk(shape: AttentionShape) -> Callable[..., None]:
    """Emitter of (queries, packed, states, scratch, n_heads, n_tiles, position, start, n, window, cap_bits).

    Every query tile of a span takes the n packed cells of the positions from `start` on. The span's first row is at
    `position`; window 0 means none.
    """
    head_dim = shape.head_dim

    def emit(
        a: Asm,
        queries: Value,
        packed: Value,
        states: Value,
        scratch: Value,
        n_heads: Value,
        n_tiles: Value,
        position: Value,
        start: Value,
        n: Value,
        window: Value,
        cap_bits: Value,
    ) -> None:
        queries, packed, states, scratch = (a.pointer(x) for x in (queries, packed, states, scratch))
        cap = a.splat(a.bitcast(a.builder.trunc(cap_bits, i32), f32)) if shape.has_softcap else None
        no_window = a.equal(window, 0)
        tiles = Tiles(a.level)
        values = a.at(packed, _keys_bytes(tiles, head_dim))
        tiles.begin(a)

        def tile(t: Value, _: list[Value]) -> list[Value]:
            first = a.add(position, a.mul(a.builder.urem(t, n_tiles), LANES))
            # Cells from here on are ahead of all 16 rows; cells up to there are behind all of their windows.
            n_seen = a.minimum(n, a.builder.sub(a.add(first, LANES), start))
            behind = a.builder.sub(a.add(first, 1), window)
            is_near = a.builder.or_(no_window, a.less(behind, a.add(start, n)))
            with a.when(a.builder.and_(a.less(a.int64(0), n_seen), is_near)):
                lanes = ir.Constant(vi32, list(range(LANES)))
                newest = a.builder.add(a.splat(a.builder.trunc(a.builder.sub(first, start), i32)), lanes)
                reach = a.select(no_window, a.int64(1 << 30), window)
                oldest = a.builder.sub(newest, a.splat(a.builder.trunc(reach, i32)))
                state = a.at(states, a.mul(t, tile_state_bytes(head_dim)))
                q = a.at(queries, a.mul(t, head_dim // TILE_DIMS * tiles.n_bytes))
                n_blocks = a.div(a.add(n_seen, 31), 32)
                _scores(a, tiles, head_dim, q, packed, scratch, n_seen)
                factor = _weights(a, tiles, head_dim, state, scratch, n_blocks, newest, oldest, cap)
                _outputs(a, tiles, head_dim, values, state, scratch, n_blocks, factor)
            return []

        a.loop(0, a.mul(n_heads, n_tiles), [], tile)
        tiles.end(a)

    return emit


def _keys_bytes(tiles: Tiles, head_dim: int) -> int:
    """Bytes of the packed K of a chunk; V lies behind."""
    return CHUNK // TILE_ROWS * (head_dim // TILE_DIMS) * tiles.n_bytes


def _scores(a: Asm, tiles: Tiles, head_dim: int, q: Value, keys: Value, scores: Value, n_seen: Value) -> None:
    """Scores f32 [cells][16] of whole groups of 64 cells; those past the packed ones are garbage, to be hidden."""
    n_steps = head_dim // TILE_DIMS

    def group(g: Value, _: list[Value]) -> list[Value]:
        group_keys = a.at(keys, a.mul(g, MOST_RESULTS * n_steps * tiles.n_bytes))
        group_scores = a.at(scores, a.mul(g, MOST_RESULTS * RESULT_BYTES))
        tiles.multiply(
            a,
            MOST_RESULTS,
            n_steps,
            left=lambda i, s: a.at(group_keys, a.mul(a.add(s, i * n_steps), tiles.n_bytes)),
            right=lambda s: a.at(q, a.mul(s, tiles.n_bytes)),
            result=lambda i: a.at(group_scores, RESULT_BYTES * i),
        )
        return []

    a.loop(0, a.div(a.add(n_seen, MOST_RESULTS * TILE_ROWS - 1), MOST_RESULTS * TILE_ROWS), [], group)


def _weights(
    a: Asm,
    tiles: Tiles,
    head_dim: int,
    state: Value,
    scratch: Value,
    n_blocks: Value,
    newest: Value,
    oldest: Value,
    cap: Value | None,
) -> Value:
    """Scores to weights, right tiles of 32 cells; returns the factor on what the state held before.

    Lane r sees the cells oldest[r] < c <= newest[r], counted from the chunk's start.
    """
    weights = a.at(scratch, VECTOR * CHUNK)
    n_cells = a.mul(n_blocks, 32)
    largest_at, sum_at = VECTOR * head_dim, VECTOR * (head_dim + 1)
    before = a.load(state, largest_at, vf32)

    def hide(c: Value, carried: list[Value]) -> list[Value]:
        score = a.load(scratch, a.mul(c, VECTOR), vf32)
        if cap is not None:
            score = a.fmul(capped(a, score, cap), a.splat_f32(LOG2_E))
        cell = a.splat(a.builder.trunc(c, i32))
        seen = a.builder.and_(a.builder.icmp_signed("<=", cell, newest), a.builder.icmp_signed(">", cell, oldest))
        score = a.select(seen, score, a.splat_f32(MASKED))
        a.store(score, scratch, a.mul(c, VECTOR))
        return [a.fmax(carried[0], score)]

    (largest,) = a.loop(0, n_cells, [before], hide)

    def weigh(c: Value, carried: list[Value]) -> list[Value]:
        at = a.mul(c, VECTOR)
        pair = [_exp2(a, a.fsub(a.load(scratch, a.add(at, VECTOR * i), vf32), largest)) for i in (0, 1)]
        tiles.store_pair(a, pair[0], pair[1], weights, c)
        return [a.fadd(total, weight) for total, weight in zip(carried, pair, strict=True)]

    sums = a.loop(0, n_cells, [a.zero(vf32)] * 2, weigh, step=2)
    factor = _exp2(a, a.fsub(before, largest))
    a.store(largest, state, largest_at)
    a.store(a.fma(a.load(state, sum_at, vf32), factor, a.fadd(*sums)), state, sum_at)
    return factor


def _value_tile(a: Asm, tiles: Tiles, values: Value, n_vectors: int, i: int, block: Offset) -> Value:
    return a.at(values, a.mul(a.add(a.mul(block, n_vectors), i), tiles.n_bytes))


def _outputs(
    a: Asm, tiles: Tiles, head_dim: int, values: Value, state: Value, scratch: Value, n_blocks: Value, factor: Value
) -> None:
    """O = O * factor + V x P"""
    weights, fresh = a.at(scratch, VECTOR * CHUNK), a.at(scratch, 2 * VECTOR * CHUNK)
    n_vectors = head_dim // LANES
    for first in range(0, n_vectors, MOST_RESULTS):
        n_results = min(MOST_RESULTS, n_vectors - first)
        group = a.at(values, first * tiles.n_bytes)
        tiles.multiply(
            a,
            n_results,
            n_blocks,
            left=partial(_value_tile, a, tiles, group, n_vectors),
            right=lambda b: a.at(weights, a.mul(b, tiles.n_bytes)),
            result=lambda i: a.at(fresh, RESULT_BYTES * i),
        )

        def merge(row: Value, _: list[Value], first: int = first) -> list[Value]:
            at = a.add(a.mul(row, VECTOR), RESULT_BYTES * first)
            old, new = a.load(state, at, vf32), a.load(fresh, a.mul(row, VECTOR), vf32)
            a.store(a.fma(old, factor, new), state, at)
            return []

        a.loop(0, LANES * n_results, [], merge)


def flash_finish(head_dim: int) -> Callable[..., None]:
    """Emitter of (states, out, row_stride, n_rows, n_heads, n_tiles): outputs, laid out as the heads of flash_begin."""

    def emit(
        a: Asm, states: Value, out: Value, row_stride: Value, n_rows: Value, n_heads: Value, n_tiles: Value
    ) -> None:
        states, out = a.pointer(states), a.pointer(out)

        def tile(t: Value, _: list[Value]) -> list[Value]:
            head, place = a.builder.udiv(t, n_tiles), a.builder.urem(t, n_tiles)
            state = a.at(states, a.mul(t, tile_state_bytes(head_dim)))
            inverse = a.fdiv(a.splat_f32(1.0), a.load(state, VECTOR * (head_dim + 1), vf32))

            def dims(d: Value, _: list[Value]) -> list[Value]:
                rows = [a.load(state, a.add(a.mul(d, RESULT_BYTES), VECTOR * i), vf32) for i in range(LANES)]
                for j, column in enumerate(transpose(a, [a.fmul(row, inverse) for row in rows])):
                    row = a.add(a.mul(place, LANES), j)
                    with a.when(a.less(row, n_rows)):
                        at = a.add(a.mul(row, row_stride), a.mul(head, F32 * head_dim), a.mul(d, VECTOR))
                        a.store(column, out, at)
                return []

            a.loop(0, head_dim // LANES, [], dims)
            return []

        a.loop(0, a.mul(n_heads, n_tiles), [], tile)

    return emit
