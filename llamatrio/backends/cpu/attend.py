"""The step's attention: rotating, storing, and sharing chunks or rows among the members of the team."""

# Numba infers the types of compiled functions itself.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"

from __future__ import annotations

from numba import int64

from llamatrio.backends.cpu import tables as t
from llamatrio.backends.cpu.call import call_kernel
from llamatrio.backends.cpu.kv_rows import CHUNK
from llamatrio.backends.cpu.native import inner, load_i32, load_i64
from llamatrio.backends.cpu.products import share
from llamatrio.backends.cpu.team import next_ticket


@inner
def _position(step, row):
    return int64(load_i32(step[t.POSITIONS], row))


@inner
def rotate_and_store(step, layers, layer, member, n_members):
    """Biases, head norms and rotary embedding on Q and K, and K and V into their cells, shared by heads."""
    n_head, n_kv, head_dim = step[t.N_HEAD], step[t.N_HEAD_KV], step[t.HEAD_DIM]
    n_heads = n_head + 2 * n_kv
    first, last = share((step[t.N_ROWS] + step[t.N_PANEL]) * n_heads, member, n_members)
    for unit in range(first, last):
        row, head = unit // n_heads, unit % n_heads
        x = step[t.QKV] + row * step[t.LD_QKV] + 4 * head * head_dim
        if head < n_head:
            _bias_norm_rope(step, layers, layer, row, x, t.Q_BIAS, head, layers[layer, t.Q_NORM])
            call_kernel(step[t.F_SCALE], x, head_dim, step[t.ATTN_SCALE])
            if step[t.K_IS_Q8] and (row < step[t.N_LONE] or not step[t.N_SPANS]):
                out = step[t.QUERIES] + (row * n_head + head) * step[t.QUERY_BYTES]
                call_kernel(step[t.F_QUANTIZE_QUERY], x, out, 1)
        elif head < n_head + n_kv:
            kv_head = head - n_head
            _bias_norm_rope(step, layers, layer, row, x, t.K_BIAS, kv_head, layers[layer, t.K_NORM])
            _store(step, step[t.F_STORE_K], layers[layer, t.K_POOL], step[t.K_STRIDE], step[t.K_IS_Q8], row, kv_head, x)
        else:
            kv_head = head - n_head - n_kv
            if layers[layer, t.V_BIAS]:
                call_kernel(step[t.F_ADD], x, layers[layer, t.V_BIAS] + 4 * kv_head * head_dim, head_dim)
            _store(step, step[t.F_STORE_V], layers[layer, t.V_POOL], step[t.V_STRIDE], step[t.V_IS_Q8], row, kv_head, x)


@inner
def _bias_norm_rope(step, layers, layer, row, x, bias, head, norm):
    head_dim = step[t.HEAD_DIM]
    if layers[layer, bias]:
        call_kernel(step[t.F_ADD], x, layers[layer, bias] + 4 * head * head_dim, head_dim)
    if norm:
        call_kernel(step[t.F_NORM], x, norm, x, head_dim, step[t.EPS])
    table = layers[layer, t.ROPE_TABLE] + 4 * _position(step, row) * step[t.N_ROT]
    call_kernel(step[t.F_ROPE], x, table, step[t.N_ROT])
    if step[t.F_HADAMARD]:
        call_kernel(step[t.F_HADAMARD], x, head_dim)


@inner
def _store(step, kernel, pool, stride, is_q8, row, head, x):
    head_dim, n_kv = step[t.HEAD_DIM], step[t.N_HEAD_KV]
    cell = pool + int64(load_i32(step[t.CELLS], row)) * stride
    if is_q8:
        scales = cell + n_kv * head_dim + head * (head_dim // 32) * 2
        call_kernel(kernel, x, cell + head * head_dim, scales, head_dim)
    else:
        call_kernel(kernel, x, cell + 2 * head * head_dim, head_dim)


@inner
def _first_position(layers, layer, position):
    """The first position that a row at `position` sees."""
    window = layers[layer, t.WINDOW]
    return max(0, position + 1 - window) if window else 0


@inner
def _chunk_start(layers, layer, position, chunk):
    return max(_first_position(layers, layer, position), chunk * CHUNK)


@inner
def _chunk_cells(position, chunk, start):
    return min(position + 1, (chunk + 1) * CHUNK) - start


@inner
def _attend_chunk(step, layers, layer, batches, member, row, chunk, kv_head, batch, state, next_row, next_chunk, part):
    """One chunk of one batch of heads of one row, into `state`.

    Meanwhile a part of the next chunk's cells is fetched: the `part`-th of as many as there are batches of heads.
    """
    position, next_position = _position(step, row), _position(step, next_row)
    start = _chunk_start(layers, layer, position, chunk)
    n = _chunk_cells(position, chunk, start)
    next_start = _chunk_start(layers, layer, next_position, next_chunk)
    fetch, last = share(_chunk_cells(next_position, next_chunk, next_start), part, step[t.N_HEAD_KV] * len(batches))
    head = kv_head * (step[t.N_HEAD] // step[t.N_HEAD_KV]) + batches[batch, t.B_FIRST_HEAD]
    if step[t.K_IS_Q8]:
        query = step[t.QUERIES] + (row * step[t.N_HEAD] + head) * step[t.QUERY_BYTES]
    else:
        query = step[t.QKV] + row * step[t.LD_QKV] + 4 * head * step[t.HEAD_DIM]
    cells = load_i64(step[t.CELL_LISTS], row) + 4 * start
    next_cells = load_i64(step[t.CELL_LISTS], next_row) + 4 * (next_start + fetch)
    scratch = step[t.ATTN_SCRATCH] + member * step[t.PRIVATE_BYTES]
    call_kernel(
        batches[batch, t.B_KERNEL], query, layers[layer, t.K_POOL], layers[layer, t.V_POOL], cells, n, state, scratch,
        kv_head, step[t.ATTN_CAP], next_cells, last - fetch,
    )  # fmt: skip


@inner
def attend_chunks(step, layers, layer, batches, member, n_members):
    """The lone rows' chunks into STATES, shared evenly; a row's states lie together, chunk after chunk."""
    n_head, n_kv, n_batches = step[t.N_HEAD], step[t.N_HEAD_KV], len(batches)
    group, per_chunk = n_head // n_kv, n_kv * n_batches
    total = 0
    for row in range(step[t.N_LONE]):
        total += _n_chunks(step, layers, layer, row) * per_chunk
    first, last = share(total, member, n_members)
    before, unit = 0, 0
    for row in range(step[t.N_LONE]):
        n_chunks = _n_chunks(step, layers, layer, row)
        first_chunk = _first_chunk(step, layers, layer, row)
        for i in range(max(0, first - unit), min(n_chunks * per_chunk, last - unit)):
            chunk, part = i // per_chunk, i % per_chunk
            kv_head, batch = part // n_batches, part % n_batches
            head = kv_head * group + batches[batch, t.B_FIRST_HEAD]
            state = step[t.STATES] + ((before + chunk) * n_head + head) * step[t.STATE_BYTES]
            next_row, next_chunk = row, first_chunk + chunk + 1
            if chunk + 1 == n_chunks:
                next_row = min(row + 1, step[t.N_LONE] - 1)
                next_chunk = _first_chunk(step, layers, layer, next_row)
            _attend_chunk(
                step, layers, layer, batches, member, row, first_chunk + chunk, kv_head, batch, state,
                next_row, next_chunk, part,
            )  # fmt: skip
        unit += n_chunks * per_chunk
        before += n_chunks


@inner
def _first_chunk(step, layers, layer, row):
    return _first_position(layers, layer, _position(step, row)) // CHUNK


@inner
def _n_chunks(step, layers, layer, row):
    position = _position(step, row)
    return position // CHUNK - _first_position(layers, layer, position) // CHUNK + 1


@inner
def finish_chunks(step, layers, layer, member, row, out):
    """A row's attention output from its states: float32 [n_head * head_dim] at `out`.

    The states are shared and other members may read them as well: merge in a copy.
    """
    n_head, size = step[t.N_HEAD], step[t.N_HEAD] * step[t.STATE_BYTES]
    before = 0
    for earlier in range(row):
        before += _n_chunks(step, layers, layer, earlier)
    state = step[t.STATE_SCRATCH] + member * step[t.PRIVATE_BYTES]
    source = step[t.STATES] + before * size
    call_kernel(step[t.F_COPY], source, state, size // 4)
    for chunk in range(1, _n_chunks(step, layers, layer, row)):
        call_kernel(step[t.F_MERGE], state, source + chunk * size, n_head)
    call_kernel(step[t.F_FINISH], state, out, n_head)


@inner
def attend_by_tickets(step, layers, layer, batches, member, first_row, n_rows):
    """Spans, and whole rows [first_row, first_row + n_rows), into ATTN_OUT.

    Whoever is free takes the next. The last ones see most: they go first, so that nobody is left with a long one.
    """
    n_kv = step[t.N_HEAD_KV]
    n_spans, per_row = step[t.N_SPANS] * n_kv, n_kv * len(batches)
    while True:
        ticket = next_ticket(step[t.TEAM])
        if ticket < n_spans:
            unit = n_spans - 1 - ticket
            _attend_span(step, layers, layer, member, unit // n_kv, unit % n_kv)
        elif ticket - n_spans < n_rows * per_row:
            unit = n_rows * per_row - 1 - (ticket - n_spans)
            row, kv_head = first_row + unit // per_row, unit % per_row // len(batches)
            _attend_whole_row(step, layers, layer, batches, member, row, kv_head, unit % len(batches))
        else:
            return


@inner
def _attend_whole_row(step, layers, layer, batches, member, row, kv_head, batch):
    """All chunks of one batch of heads of one row."""
    n_head, n_heads = step[t.N_HEAD], batches[batch, t.B_HEADS]
    state = step[t.STATE_SCRATCH] + member * step[t.PRIVATE_BYTES]
    part = state + n_heads * step[t.STATE_BYTES]
    share_of_next = kv_head * len(batches) + batch
    first_chunk, last_chunk = _first_chunk(step, layers, layer, row), _position(step, row) // CHUNK
    for chunk in range(first_chunk, last_chunk + 1):
        into = state if chunk == first_chunk else part
        _attend_chunk(
            step, layers, layer, batches, member, row, chunk, kv_head, batch, into,
            row, min(chunk + 1, last_chunk), share_of_next,
        )  # fmt: skip
        if chunk > first_chunk:
            call_kernel(step[t.F_MERGE], state, part, n_heads)
    head = kv_head * (n_head // step[t.N_HEAD_KV]) + batches[batch, t.B_FIRST_HEAD]
    out = step[t.ATTN_OUT] + 4 * (row * n_head + head) * step[t.HEAD_DIM]
    call_kernel(step[t.F_FINISH], state, out, n_heads)


@inner
def _attend_span(step, layers, layer, member, span, kv_head):
    """Consecutive rows of one sequence, for the query heads of one kv head, on tiles."""
    row, n_rows = load_i64(step[t.SPANS], 2 * span), load_i64(step[t.SPANS], 2 * span + 1)
    n_head, head_dim = step[t.N_HEAD], step[t.HEAD_DIM]
    group, n_tiles, private = n_head // step[t.N_HEAD_KV], (n_rows + 15) // 16, member * step[t.PRIVATE_BYTES]
    queries, packed = step[t.FLASH_QUERIES] + private, step[t.FLASH_PACKED] + private
    states, scores = step[t.FLASH_STATES] + private, step[t.FLASH_SCORES] + private
    query = step[t.QKV] + row * step[t.LD_QKV] + 4 * kv_head * group * head_dim
    call_kernel(step[t.F_FLASH_BEGIN], query, step[t.LD_QKV], n_rows, group, n_tiles, queries, states)
    position, k_pool, v_pool = _position(step, row), layers[layer, t.K_POOL], layers[layer, t.V_POOL]
    end = position + n_rows
    for start in range(_first_position(layers, layer, position) // CHUNK * CHUNK, end, CHUNK):
        n = min(CHUNK, end - start)
        following = min(CHUNK, end - start - n)
        cells = load_i64(step[t.CELL_LISTS], row) + 4 * start
        call_kernel(step[t.F_FLASH_PACK], k_pool, v_pool, cells, n, kv_head, packed, following)
        call_kernel(
            step[t.F_FLASH_CHUNK], queries, packed, states, scores, group, n_tiles, position, start, n,
            layers[layer, t.WINDOW], step[t.ATTN_CAP],
        )  # fmt: skip
    out = step[t.ATTN_OUT] + 4 * (row * n_head + kv_head * group) * head_dim
    call_kernel(step[t.F_FLASH_FINISH], states, out, 4 * n_head * head_dim, n_rows, group, n_tiles)
