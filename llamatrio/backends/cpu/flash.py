"""Attention of many consecutive rows of one sequence at once, on AMX tiles.

Theory of operation. A *query tile* is 16 rows of one query head, one per lane: scores, largest score and sum of
weights are vectors over rows, so the softmax needs no sum across lanes. For each CHUNK of positions (at multiples of
CHUNK, so that a row's bits depend on its own position alone) the cells of a kv head are collected once and
rounded to bf16, and then every query tile that sees them does

    scores   S [cells][16]     = K [cells][head_dim] x Q [head_dim][16]          tiles
    weights  P [cells][16]     = 2 ** (S - largest), 0 where hidden              vectors
    output   O [head_dim][16]  = O * 2 ** (old largest - largest) + V [head_dim][cells] x P    tiles

Q, K, V and P are bf16 in the layouts that the tile product reads: its left operand has rows of 32 consecutive
elements along the summed dimension, its right operand rows of pairs.

    queries   [n_heads][n_tiles][head_dim / 32][16 pairs of dims][16 rows] pairs of bf16
    packed    bf16: K [CHUNK / 16][head_dim / 32][16 cells][32 dims], then
              V [CHUNK / 32][head_dim / 16][16 dims][32 cells]
    states    [n_heads][n_tiles] of tile_state_bytes: O f32 [head_dim][16], largest [16], sum [16]

Scores are in units of ln 2 (log2 e is multiplied into the query, or after the soft cap), which saves the exponential
a product and half of its range reduction; its error of 3e-6 is nothing beside the rounding of P to bf16.

Lanes past the last row of a span compute what nobody reads. A lane to which a whole chunk is hidden keeps its state:
its weights are 0 and its factor is 1; before its first visible cell it gathers garbage, which the factor 0 then clears.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from llvmlite import ir

from llamatrio.backends.cpu.attention import CHUNK, AttentionShape, Rows
from llamatrio.backends.cpu.ops import F32, MASKED, VECTOR, capped
from llamatrio.backends.cpu.vector import LANES, Asm, Value, f32, i32, vf32, vi32

TILE = 1024
LOG2_E = 1.4426950408889634
_EXP2 = [math.log(2) ** n / math.factorial(n) for n in range(6)]
_TILE_CELLS, _TILE_DIMS, _ACCUMULATORS = 16, 32, 4


def has_flash(shape: AttentionShape, *, has_amx: bool) -> bool:
    """Whether these kernels exist for heads of this shape."""
    return has_amx and shape.head_dim % _TILE_DIMS == 0


def most_span_rows(group: int) -> int:
    """Rows taken at once: the more, the fewer times cells are collected; the states should stay in cache."""
    return 128 if group <= 4 else 64


def tile_state_bytes(head_dim: int) -> int:
    """Bytes of the state of one query tile."""
    return VECTOR * (head_dim + 2)


def queries_bytes(head_dim: int, group: int) -> int:
    """Bytes of the queries of a span."""
    return group * most_span_rows(group) // LANES * (head_dim // _TILE_DIMS) * TILE


def states_bytes(head_dim: int, group: int) -> int:
    """Bytes of the states of a span."""
    return group * most_span_rows(group) // LANES * tile_state_bytes(head_dim)


def packed_bytes(head_dim: int) -> int:
    """Bytes of a chunk's cells."""
    return 2 * CHUNK * head_dim * 2


def scores_bytes() -> int:
    """Bytes of scratch of flash_chunk: scores, weights, and an output before it is merged."""
    return VECTOR * CHUNK + VECTOR * CHUNK // 2 + _ACCUMULATORS * TILE


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


def flash_begin(shape: AttentionShape) -> Callable[..., None]:
    """Emitter of (q, row_stride, n_rows, n_heads, n_tiles, queries, states).

    q: f32 heads, scaled; row r of head h at q + r * row_stride + h * 4 * head_dim. Packs them and clears the states.
    """
    head_dim, n_steps = shape.head_dim, shape.head_dim // _TILE_DIMS

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
        last = a.add(n_rows, -1)

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
                at = a.mul(s, F32 * _TILE_DIMS)
                pairs = [_query_row(a, shape, row, at) for row in rows]
                for i, column in enumerate(transpose(a, pairs)):
                    a.store(column, target, a.add(a.mul(a.add(a.mul(t, n_steps), s), TILE), VECTOR * i))
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


def _query_row(a: Asm, shape: AttentionShape, row: Value, at: Value) -> Value:
    low, high = a.load(row, at, vf32), a.load(row, a.add(at, VECTOR), vf32)
    if not shape.has_softcap:
        low, high = (a.fmul(half, a.splat_f32(LOG2_E)) for half in (low, high))
    return _bf16_row(a, low, high)


def _exp2(a: Asm, x: Value) -> Value:
    """2 ** x for x <= 0, exactly 1 at 0 and exactly 0 from -127 down: Taylor's polynomial for |fraction| <= 1 / 2."""
    x = a.fmax(x, a.splat_f32(-127.0))
    n = a.round_to_int(x)
    f = a.fsub(x, a.to_f32(n))
    p = a.splat_f32(_EXP2[-1])
    for coefficient in reversed(_EXP2[:-1]):
        p = a.fma(p, f, a.splat_f32(coefficient))
    return a.bitcast(a.builder.add(a.bitcast(p, vi32), a.builder.shl(n, a.splat_int(23))), vf32)


def _bf16_row(a: Asm, low: Value, high: Value) -> Value:
    """32 consecutive values as 32 bf16, in a vector of 16 x 32 bits."""
    return a.bitcast(a.concat([a.f32_to_bf16(low), a.f32_to_bf16(high)]), vi32)


def flash_pack(shape: AttentionShape) -> Callable[..., None]:
    """Emitter of (k, v, cells, n, k_stride, v_stride, head, packed, next_n): collects a chunk of 1 <= n <= CHUNK cells.

    Cells n .. rounded up to 32 repeat the last one. The next_n <= CHUNK cells behind these are prefetched.
    """
    head_dim = shape.head_dim
    n_steps, n_vectors = head_dim // _TILE_DIMS, head_dim // LANES

    def emit(
        a: Asm,
        k: Value,
        v: Value,
        cells: Value,
        n: Value,
        k_stride: Value,
        v_stride: Value,
        head: Value,
        packed: Value,
        next_n: Value,
    ) -> None:
        cells, packed = a.pointer(cells), a.pointer(packed)
        k_rows = Rows(a, shape, shape.type_k, a.pointer(k), k_stride, cells, head)
        v_rows = Rows(a, shape, shape.type_v, a.pointer(v), v_stride, cells, head)
        values = a.at(packed, 2 * CHUNK * head_dim)
        last = a.add(n, -1)
        furthest = a.add(n, next_n, -1)

        def key(i: Value, _: list[Value]) -> list[Value]:
            place, ahead = a.minimum(i, last), a.minimum(a.add(i, CHUNK), furthest)
            k_rows.prefetch(ahead, "L2")
            v_rows.prefetch(ahead, "L2")
            tile = a.mul(a.mul(a.div(i, _TILE_CELLS), n_steps), TILE)
            in_tile = a.mul(a.builder.and_(i, a.int64(_TILE_CELLS - 1)), VECTOR)
            vectors = k_rows.values(place, bias=128)
            for s in range(n_steps):
                at = a.add(tile, in_tile, TILE * s)
                a.store(_bf16_row(a, vectors[2 * s], vectors[2 * s + 1]), packed, at)
            return []

        def block(b: Value, _: list[Value]) -> list[Value]:
            places = [a.minimum(a.add(a.mul(b, 32), j), last) for j in range(32)]
            for d in range(n_vectors):
                rows = [v_rows.value(place, d, bias=0) for place in places]
                pairs = [a.bf16_pairs(rows[2 * p], rows[2 * p + 1]) for p in range(LANES)]
                at = a.mul(a.add(a.mul(b, n_vectors), d), TILE)
                for i, column in enumerate(transpose(a, pairs)):
                    a.store(column, values, a.add(at, VECTOR * i))
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
        a.tile_config()

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
                q = a.at(queries, a.mul(t, head_dim // _TILE_DIMS * TILE))
                n_blocks = a.div(a.add(n_seen, 31), 32)
                _tile_scores(a, head_dim, q, packed, scratch, n_seen)
                factor = _tile_weights(a, head_dim, state, scratch, n_blocks, newest, oldest, cap)
                _tile_outputs(a, head_dim, a.at(packed, 2 * CHUNK * head_dim), state, scratch, n_blocks, factor)
            return []

        a.loop(0, a.mul(n_heads, n_tiles), [], tile)
        a.tile_release()

    return emit


def _tile_scores(a: Asm, head_dim: int, q: Value, keys: Value, scores: Value, n_seen: Value) -> None:
    """Scores f32 [cells][16] of whole groups of 64 cells; those past the packed ones are garbage, to be hidden."""
    n_steps = head_dim // _TILE_DIMS

    def group(g: Value, _: list[Value]) -> list[Value]:
        for i in range(_ACCUMULATORS):
            a.tile_zero(i)
        for s in range(n_steps):
            a.tile_load(4, a.at(q, TILE * s))
            for i in range(_ACCUMULATORS):
                a.tile_load(
                    5 + i % 3, a.at(keys, a.add(a.mul(g, _ACCUMULATORS * n_steps * TILE), (i * n_steps + s) * TILE))
                )
                a.tile_dot_bf16(i, 5 + i % 3, 4)
        for i in range(_ACCUMULATORS):
            a.tile_store(i, a.at(scores, a.add(a.mul(g, _ACCUMULATORS * TILE), i * TILE)), a.int64(VECTOR))
        return []

    a.loop(0, a.div(a.add(n_seen, 63), 64), [], group)


def _tile_weights(
    a: Asm,
    head_dim: int,
    state: Value,
    scratch: Value,
    n_blocks: Value,
    newest: Value,
    oldest: Value,
    cap: Value | None,
) -> Value:
    """Scores to weights, pairs of bf16 [cells / 2][16]; returns the factor on what the state held before.

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
        a.store(a.bf16_pairs(*pair), weights, a.mul(c, VECTOR // 2))
        return [a.fadd(total, weight) for total, weight in zip(carried, pair, strict=True)]

    sums = a.loop(0, n_cells, [a.zero(vf32)] * 2, weigh, step=2)
    factor = _exp2(a, a.fsub(before, largest))
    a.store(largest, state, largest_at)
    a.store(a.fma(a.load(state, sum_at, vf32), factor, a.fadd(*sums)), state, sum_at)
    return factor


def _tile_outputs(
    a: Asm, head_dim: int, values: Value, state: Value, scratch: Value, n_blocks: Value, factor: Value
) -> None:
    """O = O * factor + V x P"""
    weights = a.at(scratch, VECTOR * CHUNK)
    fresh = a.at(scratch, VECTOR * CHUNK + VECTOR * CHUNK // 2)
    n_vectors = head_dim // LANES
    for first in range(0, n_vectors, _ACCUMULATORS):
        dims = range(first, min(first + _ACCUMULATORS, n_vectors))
        for i, _ in enumerate(dims):
            a.tile_zero(i)

        def block(b: Value, _: list[Value], dims: range = dims) -> list[Value]:
            a.tile_load(4, a.at(weights, a.mul(b, TILE)))
            for i, d in enumerate(dims):
                a.tile_load(5 + i % 3, a.at(values, a.mul(a.add(a.mul(b, n_vectors), d), TILE)))
                a.tile_dot_bf16(i, 5 + i % 3, 4)
            return []

        a.loop(0, n_blocks, [], block)
        for i, _ in enumerate(dims):
            a.tile_store(i, a.at(fresh, TILE * i), a.int64(VECTOR))

        def merge(row: Value, _: list[Value], first: int = first) -> list[Value]:
            at = a.add(a.mul(row, VECTOR), TILE * first)
            old, new = a.load(state, at, vf32), a.load(fresh, a.mul(row, VECTOR), vf32)
            a.store(a.fma(old, factor, new), state, at)
            return []

        a.loop(0, LANES * len(dims), [], merge)


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
                rows = [a.load(state, a.add(a.mul(d, TILE), VECTOR * i), vf32) for i in range(LANES)]
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
