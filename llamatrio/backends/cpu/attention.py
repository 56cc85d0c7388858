"""Attention of one row over scattered cells, for f16 and q8_0 caches.

Theory of operation. A row's cells are cut into chunks of CHUNK positions, at multiples of CHUNK; each chunk gives a
*state* per query head: the unnormalised output, the largest score and the sum of weights. States are merged in
order of position and finished by a division. A row's bits depend on its position alone: whether one thread
takes all chunks or each chunk goes to another thread, the same merges happen in the same order.

Within a chunk, 16 cells at a time. Lanes run along the head for the products, so 16 cells give 16 vectors of partial
sums; a tree of shuffles turns these into one vector with a score per lane (no sum across a register per cell).
All query heads of a batch share each load of K and V. q8_0 scores are integer products of 32 at a time with the
query quantized likewise; two cells fill a vector. While it computes, a kernel fetches rows of the next chunk.

    q   f16 cache   f32 [n][head_dim], scaled
        q8_0 cache  records of query_bytes(head_dim) per head: 15-bit integers as 128 high + low, int8 high
                    [head_dim], int8 low [head_dim], then per block f32 scale and i32 correction (128 times the
                    block's sum, as K is stored plus 128). One row of 8 bits more: rounding the query to 8 bits
                    would cost as much as the whole cache does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from llamatrio.backends.cpu.activations import BLOCK
from llamatrio.backends.cpu.attention_states import state_bytes
from llamatrio.backends.cpu.kv_rows import ADDRESS, CHUNK, AttentionShape, Rows, fetcher
from llamatrio.backends.cpu.levels import Level
from llamatrio.backends.cpu.ops import F32, MASKED, VECTOR, capped
from llamatrio.backends.cpu.vector import LANES, Asm, Value, f32, i8, i32, vec, vf32, vi32
from llamatrio.model.spec import KVType

_QUERY_MAX = 127 * 128.0


def query_bytes(kind: KVType, head_dim: int) -> int:
    """Bytes of one head's query as the kernels for a K cache of `kind` read it."""
    return F32 * head_dim if kind == "f16" else 2 * head_dim + 8 * (head_dim // BLOCK)


def head_batches(group: int, level: Level) -> list[int]:
    """How the query heads of a group are split over kernels, so that the sums of a batch stay in registers."""
    n = -(-group // max(1, level.n_vectors // 6))
    return [group // n + (i < group % n) for i in range(n)]


def quantize_query(head_dim: int) -> Callable[[Asm, Value, Value, Value], None]:
    """Emitter of (q, out, n): f32 heads [n][head_dim] into n records of query_bytes("q8_0", head_dim)."""
    n_blocks = head_dim // BLOCK

    def emit(a: Asm, q: Value, out: Value, n: Value) -> None:
        source, target = a.pointer(q), a.pointer(out)

        def head(h: Value, _: list[Value]) -> list[Value]:
            record = a.at(target, a.mul(h, query_bytes("q8_0", head_dim)))
            for block in range(n_blocks):
                at = a.add(a.mul(h, F32 * head_dim), F32 * BLOCK * block)
                low, high = a.load(source, at, vf32), a.load(source, a.add(at, VECTOR), vf32)
                largest = a.reduce_max(a.fmax(a.fabs(low), a.fabs(high)))
                is_zero = a.builder.fcmp_ordered("==", largest, a.float32(0.0))
                inverse = a.select(is_zero, a.float32(0.0), a.fdiv(a.float32(_QUERY_MAX), largest))
                codes = [a.round_to_int(a.fmul(v, a.splat(inverse))) for v in (low, high)]
                for i, code in enumerate(codes):
                    # 64 more, so that the low part is -64 .. 63.
                    top = a.builder.ashr(a.builder.add(code, a.splat_int(64)), a.splat_int(7))
                    rest = a.builder.sub(code, a.builder.shl(top, a.splat_int(7)))
                    a.store(a.builder.trunc(top, vec(i8)), record, BLOCK * block + LANES * i)
                    a.store(a.builder.trunc(rest, vec(i8)), record, head_dim + BLOCK * block + LANES * i)
                total = a.reduce_add_int(a.builder.add(*codes))
                a.store(a.fmul(largest, a.float32(1 / _QUERY_MAX)), record, 2 * head_dim + F32 * block)
                correction = a.builder.mul(total, a.int32(128))
                a.store(correction, record, 2 * head_dim + F32 * (n_blocks + block))
            return []

        a.loop(0, n, [], head)

    return emit


def attend(shape: AttentionShape) -> Callable[..., None]:
    """Emitter of (q, k, v, cells, n, state, scratch, head, cap_bits, next_cells, next_n).

    k, v: addresses of the pools of one layer; cells: i32 [n] indices of rows there, in order of position,
    1 <= n <= CHUNK; head: the kv head; scratch: scratch_bytes(shape) bytes. The whole rows of the cells i32 [next_n]
    at next_cells are brought near meanwhile.
    """

    def emit(
        a: Asm,
        q: Value,
        k: Value,
        v: Value,
        cells: Value,
        n: Value,
        state: Value,
        scratch: Value,
        head: Value,
        cap_bits: Value,
        next_cells: Value,
        next_n: Value,
    ) -> None:
        q, k, v, state, scratch, cells, next_cells = (
            a.pointer(x) for x in (q, k, v, state, scratch, cells, next_cells)
        )
        k_rows = Rows(a, shape, shape.type_k, k, cells, head)
        v_rows = Rows(a, shape, shape.type_v, v, cells, head)
        k_rows.find_all(a.at(scratch, _found_at(shape)), n)
        v_rows.find_all(a.at(scratch, _found_at(shape) + ADDRESS * CHUNK), n)
        coming = [Rows(a, shape, rows.kind, pool, next_cells, a.int64(0)) for rows, pool in ((k_rows, k), (v_rows, v))]
        cap = a.splat(a.bitcast(a.builder.trunc(cap_bits, i32), f32)) if shape.has_softcap else None
        largest = _scores(a, shape, q, k_rows, n, scratch, cap, fetcher(a, coming, next_n))
        sums = _weights(a, shape, v_rows, n, scratch, largest)
        _outputs(a, shape, v_rows, n, scratch, state)
        for h in range(shape.n_heads):
            base = h * state_bytes(shape.head_dim)
            a.store(a.lane(largest[h], 0), state, base + F32 * shape.head_dim)
            a.store(a.reduce_add(sums[h]), state, base + F32 * shape.head_dim + F32)

    return emit


def scratch_bytes(shape: AttentionShape) -> int:
    """Scores, for a q8_0 V cache the weights times the scale of each block, and where the K and V rows are."""
    return _found_at(shape) + 2 * ADDRESS * CHUNK


def _found_at(shape: AttentionShape) -> int:
    n_scaled = shape.head_dim // BLOCK if shape.type_v == "q8_0" else 0
    return shape.n_heads * (1 + n_scaled) * CHUNK * F32


def _scores(
    a: Asm,
    shape: AttentionShape,
    q: Value,
    k: Rows,
    n: Value,
    scratch: Value,
    cap: Value | None,
    fetch: Callable[[Value], None],
) -> list[Value]:
    """Scores into scratch [head][CHUNK], MASKED beyond n; per head the largest of all, in all lanes."""
    step = _scores_f16 if shape.type_k == "f16" else _scores_q8

    def block(i: Value, largest: list[Value]) -> list[Value]:
        places = [a.add(i, j) for j in range(LANES)]
        fetch(i)
        scores = step(a, shape, q, k, places)
        inside = a.builder.icmp_signed(
            "<", ir.Constant(vi32, list(range(LANES))), a.splat(a.builder.trunc(a.builder.sub(n, i), i32))
        )
        results = []
        for h, score in enumerate(scores):
            if cap is not None:
                score = capped(a, score, cap)
            score = a.select(inside, score, a.splat_f32(MASKED))
            a.store(score, scratch, a.add(h * CHUNK * F32, a.mul(i, F32)))
            results.append(a.fmax(largest[h], score))
        return results

    running = a.loop(0, n, [a.splat_f32(MASKED)] * shape.n_heads, block, step=LANES)
    return [a.splat(a.reduce_max(largest)) for largest in running]


def _scores_f16(a: Asm, shape: AttentionShape, q: Value, k: Rows, places: Sequence[Value]) -> list[Value]:
    n_heads, n_vectors = shape.n_heads, shape.head_dim // LANES

    def partial_sums(cell: int) -> list[Value]:
        row = k.row(places[cell])
        sums: list[Value] = [None] * n_heads
        for d in range(n_vectors):
            keys = a.load_f16(row, 2 * LANES * d)
            for h in range(n_heads):
                query = a.load(q, F32 * (h * shape.head_dim + LANES * d), vf32)
                sums[h] = a.fmul(keys, query) if d == 0 else a.fma(keys, query, sums[h])
        return sums

    return _reduce_tree(a, partial_sums, a.fadd, first_level=1)


def _scores_q8(a: Asm, shape: AttentionShape, q: Value, k: Rows, places: Sequence[Value]) -> list[Value]:
    n_heads, n_blocks = shape.n_heads, shape.head_dim // BLOCK
    record = query_bytes("q8_0", shape.head_dim)
    scales = k.scales_of(places)
    totals: list[Value] = [None] * n_heads
    half = vec(i8, BLOCK)
    for block in range(n_blocks):

        def partial_sums(cell: int, block: int = block) -> list[Value]:
            keys = a.concat([a.load(k.row(places[cell + i]), BLOCK * block, half) for i in (0, 4)])
            sums = []
            for h in range(n_heads):
                parts = []
                for part in (0, shape.head_dim):
                    query = a.load(q, record * h + part + BLOCK * block, half)
                    parts.append(a.dot([keys], [a.concat([query, query])], 8))
                sums.append(a.builder.add(a.builder.shl(parts[0], a.splat_int(7)), parts[1]))
            return sums

        products = _reduce_tree(a, partial_sums, a.builder.add, first_level=2)
        for h in range(n_heads):
            at = record * h + 2 * shape.head_dim + F32 * block
            correction = a.load_splat(q, at + F32 * n_blocks, i32)
            exact = a.to_f32(a.builder.sub(products[h], correction))
            factor = a.fmul(scales[block], a.load_splat(q, at))
            totals[h] = a.fmul(exact, factor) if block == 0 else a.fma(exact, factor, totals[h])
    return totals


# The lanes that each level of the tree takes from two vectors (a, then b = 16 + ...), to be summed.
_TREE = (
    (tuple(range(8)) + tuple(range(16, 24)), tuple(range(8, 16)) + tuple(range(24, 32))),
    tuple(tuple(lane + 4 * odd for first in (0, 8, 16, 24) for lane in range(first, first + 4)) for odd in (0, 1)),
    tuple(
        tuple(
            lane
            for first in range(0, 16, 4)
            for lane in (first + 2 * odd, first + 2 * odd + 1, first + 2 * odd + 16, first + 2 * odd + 17)
        )
        for odd in (0, 1)
    ),
    tuple(
        tuple(
            lane
            for first in range(0, 16, 4)
            for lane in (first + odd, first + 2 + odd, first + 16 + odd, first + 18 + odd)
        )
        for odd in (0, 1)
    ),
)


def _reduce_tree(
    a: Asm, leaf: Callable[[int], list[Value]], add: Callable[[Value, Value], Value], first_level: int
) -> list[Value]:
    """Sums of 16 cells, one per lane, from vectors of partial sums.

    leaf(cell) gives a vector per head: of one cell (first_level 1), or of the cells `cell` and `cell + 4`, one per
    half (first_level 2). The leaves are taken in such an order that lane i ends as cell i, and merged as soon as two
    are there, so that few registers are live.
    """

    def node(level: int, place: int) -> list[Value]:
        if level < first_level:
            # place has the bits (l4, l3, l2, l1) of the choices on the way down; its lane is (l2, l1, l4, l3).
            return leaf((place >> 2 | place << 2) & 15)
        first, second = node(level - 1, place), node(level - 1, place + (1 << (level - 1)))
        low, high = _TREE[level - 1]
        return [add(a.shuffle(x, y, low), a.shuffle(x, y, high)) for x, y in zip(first, second, strict=True)]

    return node(4, 0)


def _weights(a: Asm, shape: AttentionShape, v: Rows, n: Value, scratch: Value, largest: Sequence[Value]) -> list[Value]:
    """Turns the scores into weights exp(score - largest), times V's scales where it has any; per head their sums."""
    n_scaled = shape.head_dim // BLOCK if shape.type_v == "q8_0" else 0

    def block(i: Value, sums: list[Value]) -> list[Value]:
        scales = v.scales_of([a.add(i, j) for j in range(LANES)]) if n_scaled else []
        results = []
        for h in range(shape.n_heads):
            at = a.add(h * CHUNK * F32, a.mul(i, F32))
            weight = a.exp(a.fsub(a.load(scratch, at, vf32), largest[h]))
            a.store(weight, scratch, at)
            for b, scale in enumerate(scales):
                scaled = (shape.n_heads + h * n_scaled + b) * CHUNK * F32
                a.store(a.fmul(weight, scale), scratch, a.add(scaled, a.mul(i, F32)))
            results.append(a.fadd(sums[h], weight))
        return results

    return a.loop(0, n, [a.zero(vf32)] * shape.n_heads, block, step=LANES)


def _outputs(a: Asm, shape: AttentionShape, v: Rows, n: Value, scratch: Value, state: Value) -> None:
    """Sum over the cells of weight times V into the states, as many dimensions at a time as registers hold."""
    n_vectors = shape.head_dim // LANES
    width = max(1, a.level.n_vectors * 5 // 8 // shape.n_heads)
    for first in range(0, n_vectors, width):
        dims = range(first, min(n_vectors, first + width))
        sums = iter(_output_sums(a, shape, v, n, scratch, dims))
        for h in range(shape.n_heads):
            for d in dims:
                a.store(next(sums), state, h * state_bytes(shape.head_dim) + VECTOR * d)


def _output_sums(a: Asm, shape: AttentionShape, v: Rows, n: Value, scratch: Value, dims: range) -> list[Value]:
    """Per head the vectors `dims` of its output."""
    n_scaled = shape.head_dim // BLOCK if shape.type_v == "q8_0" else 0

    def cell(i: Value, sums: list[Value]) -> list[Value]:
        row = v.row(i)
        results = list(sums)
        for place, d in enumerate(dims):
            if n_scaled:
                values = a.to_f32(a.builder.sext(a.load(row, LANES * d, vec(i8)), vi32))
            else:
                values = a.load_f16(row, 2 * LANES * d)
            for h in range(shape.n_heads):
                line = shape.n_heads + h * n_scaled + d // 2 if n_scaled else h
                weight = a.load_splat(scratch, a.add(line * CHUNK * F32, a.mul(i, F32)))
                at = h * len(dims) + place
                results[at] = a.fma(values, weight, results[at])
        return results

    return a.loop(0, n, [a.zero(vf32)] * (shape.n_heads * len(dims)), cell)
