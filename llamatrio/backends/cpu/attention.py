"""Attention of one row over scattered cells, for f16 and q8_0 caches.

Theory of operation. A row's cells are cut into chunks of CHUNK positions, at multiples of CHUNK; each chunk gives a
*state* per query head: the unnormalised output, the largest score and the sum of weights. States are merged in
order of position and finished by a division. A row's bits depend on its position alone: whether one thread
takes all chunks or each chunk goes to another thread, the same merges happen in the same order.

Within a chunk, 16 cells at a time. Lanes run along the head for the products, so 16 cells give 16 vectors of partial
sums; a tree of shuffles turns these into one vector with a score per lane (no sum across a register per cell).
All query heads of a batch share each load of K and V. q8_0 scores are integer products of 32 at a time with the
query quantized likewise; two cells fill a vector.

    q   f16 cache   f32 [n][head_dim], scaled
        q8_0 cache  records of query_bytes(head_dim) per head: 15-bit integers as 128 high + low, int8 high
                    [head_dim], int8 low [head_dim], then per block f32 scale and i32 correction (128 times the
                    block's sum, as K is stored plus 128). One row of 8 bits more: rounding the query to 8 bits
                    would cost as much as the whole cache does.
    state           per head state_bytes(head_dim): f32 [head_dim] output, then largest score, then sum
    row of cells    f16:   f16 [n_head_kv][head_dim]
                    q8_0:  bytes [n_head_kv][head_dim], then f16 scales [n_head_kv][head_dim / 32], padded
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from llvmlite import ir

from llamatrio.backends.cpu.activations import BLOCK
from llamatrio.backends.cpu.levels import Level
from llamatrio.backends.cpu.ops import F32, MASKED, VECTOR, capped
from llamatrio.backends.cpu.vector import LANES, Asm, Value, f32, i8, i16, i32, i64, vec, vf32, vi32
from llamatrio.model.spec import KVType

CHUNK = 128
"""Positions whose scores are held at once; a multiple of 16."""
ADDRESS = 8
_LINE = 64
_LONGEST_ASKED_FOR = 256
"""Bytes of a row."""
_ROW_ALIGNMENT = 16
_SCALE_BYTES = 2
_QUERY_MAX = 127 * 128.0


def row_bytes(kind: KVType, n_head_kv: int, head_dim: int) -> int:
    """Bytes of one cell's K (or V) row."""
    if kind == "f16":
        return 2 * n_head_kv * head_dim
    n_bytes = n_head_kv * head_dim + n_head_kv * head_dim // BLOCK * _SCALE_BYTES
    # Scales are read four bytes at a time, the last ones included.
    return -(-(n_bytes + _SCALE_BYTES) // _ROW_ALIGNMENT) * _ROW_ALIGNMENT


def query_bytes(kind: KVType, head_dim: int) -> int:
    """Bytes of one head's query as the kernels for a K cache of `kind` read it."""
    return F32 * head_dim if kind == "f16" else 2 * head_dim + 8 * (head_dim // BLOCK)


def state_bytes(head_dim: int) -> int:
    """Bytes of one head's state."""
    return F32 * head_dim + VECTOR


def head_batches(group: int, level: Level) -> list[int]:
    """How the query heads of a group are split over kernels, so that the sums of a batch stay in registers."""
    n = -(-group // max(1, level.n_vectors // 6))
    return [group // n + (i < group % n) for i in range(n)]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What an attention kernel is compiled for."""

    head_dim: int
    n_head_kv: int
    n_heads: int
    """Query heads that share the loads: one of head_batches."""
    type_k: KVType
    type_v: KVType
    has_softcap: bool

    @property
    def name(self) -> str:
        """Identifies the kernel."""
        cap = "_cap" if self.has_softcap else ""
        return f"attend_{self.n_heads}x{self.head_dim}_{self.n_head_kv}_{self.type_k}_{self.type_v}{cap}"


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
        largest = _scores(a, shape, q, k_rows, n, scratch, cap, _fetcher(a, coming, next_n))
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


def _fetcher(a: Asm, pools: Sequence[Rows], n: Value) -> Callable[[Value], None]:
    """What a loop over a chunk calls at cell i = 0, 16, ... to have n rows of each pool in cache at its end.

    Rows are scattered, so no hardware foresees them. Short ones are asked for a few at a time. Of long ones that would
    be more lines than a core can have under way: those are read, all at once, which the hardware takes for a stream.
    """
    is_short = max(rows.stride for rows in pools) <= _LONGEST_ASKED_FOR
    n_at_once = a.int64(CHUNK) if not is_short else a.builder.add(a.div(n, CHUNK // LANES), a.int64(1))

    def fetch(i: Value) -> None:
        first = a.mul(a.div(i, LANES), n_at_once)

        def one(rows: Rows) -> Callable[[Value, list[Value]], list[Value]]:
            def body(j: Value, _: list[Value]) -> list[Value]:
                rows.fetch(j, by_reading=not is_short)
                return []

            return body

        for rows in pools:
            a.loop(a.minimum(first, n), a.minimum(a.add(first, n_at_once), n), [], one(rows))

    return fetch


class Rows:
    """The rows of one kv head in a pool, by place in the list of cells."""

    def __init__(self, a: Asm, shape: AttentionShape, kind: KVType, pool: Value, cells: Value, head: Value) -> None:
        self.a, self.kind, self.cells = a, kind, cells
        self.stride = row_bytes(kind, shape.n_head_kv, shape.head_dim)
        self.n_vectors = shape.head_dim // LANES
        self.n_blocks = shape.head_dim // BLOCK
        self.head_bytes = shape.head_dim * (2 if kind == "f16" else 1)
        self.base = a.at(pool, a.mul(head, self.head_bytes))
        self.scales = a.add(
            shape.n_head_kv * shape.head_dim, a.mul(head, self.n_blocks * _SCALE_BYTES - shape.head_dim)
        )
        """From the head's elements to its scales, in bytes."""
        self.found: Value | None = None

    def find_all(self, found: Value, n: Value) -> None:
        """From here on `row` looks into the list `found` (ADDRESS bytes [CHUNK]), which this fills for n rows.

        Places from n up to the next multiple of 16 have the last row.
        """
        a, half, kind = self.a, LANES // 2, vec(i64, LANES // 2)
        base = a.splat(a.builder.ptrtoint(self.base, i64), half)
        last = a.load(self.cells, a.mul(a.add(n, -1), 4), i32)

        def some(i: Value, _: list[Value]) -> list[Value]:
            cells = a.load_first(self.cells, a.mul(i, 4), a.builder.sub(n, i), last)
            for first in (0, half):
                wide = a.builder.zext(a.part(cells, first, half), kind)
                rows = a.builder.add(base, a.builder.mul(wide, ir.Constant(kind, [self.stride] * half)))
                a.store(rows, found, a.add(a.mul(i, ADDRESS), ADDRESS * first))
            return []

        a.loop(0, n, [], some, step=LANES)
        self.found = found

    def row(self, place: Value) -> Value:
        """Pointer to the head's elements in the row at `place`."""
        a = self.a
        if self.found is not None:
            return a.pointer(a.load(self.found, a.mul(place, ADDRESS), i64))
        cell = a.builder.zext(a.load(self.cells, a.mul(place, 4), i32), i64)
        return a.at(self.base, a.mul(cell, self.stride))

    def prefetch(self, place: Value, into: Literal["L1", "L2"]) -> None:
        """Asks for the head's elements in the row at `place`."""
        row = self.row(place)
        for line in range(0, self.head_bytes, _LINE):
            self.a.prefetch(row, line, into)

    def fetch(self, place: Value, *, by_reading: bool) -> None:
        """Brings near what of the row at `place` lies behind the head's first element: for head 0 all of it."""
        row = self.row(place)
        lines = list(range(0, self.stride, _LINE))
        if self.stride - lines[-1] > _ROW_ALIGNMENT:
            lines.append(self.stride - _ROW_ALIGNMENT)  # rows need not begin with a line
        for line in lines:
            if by_reading:
                self.a.load_shared(row, line, i64)
            else:
                self.a.prefetch(row, line, "L1")

    def values(self, place: Value, *, bias: int) -> list[Value]:
        """All elements of the row at `place`, as vectors of 16 x f32; bias is what the stored integers have added."""
        return [self.value(place, d, bias=bias) for d in range(self.n_vectors)]

    def value(self, place: Value, d: int, *, bias: int) -> Value:
        """Elements 16 d .. 16 d + 15 of the row at `place`."""
        a = self.a
        row = self.row(place)
        if self.kind == "f16":
            return a.load_f16(row, 2 * LANES * d)
        stored = a.load(row, LANES * d, vec(i8))
        codes = a.builder.sub(a.builder.zext(stored, vi32), a.splat_int(bias)) if bias else a.builder.sext(stored, vi32)
        scale = a.f16_to_f32(a.splat(a.load(row, a.add(self.scales, _SCALE_BYTES * (d // 2)), i16)))
        return a.fmul(a.to_f32(codes), scale)

    def scales_of(self, places: Sequence[Value]) -> list[Value]:
        """The scales of 16 rows: per block 16 x f32."""
        a = self.a
        rows = [self.row(place) for place in places]
        scales: list[Value] = []
        for block in range(0, self.n_blocks, 2):
            # Two scales at a time; behind the last of a row there is room.
            pairs: Value = ir.Constant(vi32, ir.Undefined)
            for i, row in enumerate(rows):
                pair = a.load(row, a.add(self.scales, _SCALE_BYTES * block), i32)
                pairs = a.builder.insert_element(pairs, pair, a.int32(i))
            for bits in (pairs, a.builder.lshr(pairs, a.splat_int(16))):
                scales.append(a.f16_to_f32(a.builder.trunc(bits, vec(i16))))
        return scales[: self.n_blocks]


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
