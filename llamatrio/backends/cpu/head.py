"""The end of the step: final norm, the head product for the wanted rows, and the likeliest tokens of each.

Where nothing but the likeliest tokens is wanted and the head has a sketch, most of the head is not read (screen.py).
"""

# Numba infers the types of compiled functions itself.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"

from __future__ import annotations

import math

from numba import float32, int64

from llamatrio.backends.cpu import tables as t
from llamatrio.backends.cpu.call import call_kernel
from llamatrio.backends.cpu.native import inner, load_i32, store_f32
from llamatrio.backends.cpu.ops import MASKED
from llamatrio.backends.cpu.products import is_private, share, x_row
from llamatrio.backends.cpu.screen import read_candidates
from llamatrio.backends.cpu.team import barrier
from llamatrio.backends.cpu.topk import BLOCK, SEGMENT, log_sum_exp, select_top


@inner
def _is_owner(step, row, place, member, n_members):
    """Whether this member holds the residual stream of `row`, the place-th of the wanted rows."""
    n_rows = step[t.N_ROWS]
    if row >= n_rows:
        first, last = share(step[t.N_PANEL], member, n_members)
        return n_rows + first <= row < n_rows + last
    if is_private(step, n_members):
        return place % n_members == member
    first, last = share(n_rows, member, n_members)
    return first <= row < last


@inner
def _head_inputs(step, layers, matrices, member, n_members):
    """Last residual add and final norm of the wanted rows, in the form that the head reads."""
    n_embd, n_out = step[t.N_EMBD], step[t.N_OUT]
    post_norm = layers[step[t.N_LAYER] - 1, t.POST_FFN_NORM]
    takes_q8 = matrices[len(matrices) - 1, t.M_TAKES_Q8]
    for place in range(n_out):
        row = int64(load_i32(step[t.OUT_ROWS], place))
        if not _is_owner(step, row, place, member, n_members):
            continue
        x = x_row(step, member, n_members, row)
        residual = step[t.LAYER_OUT] + row * step[t.LD_LAYER_OUT]
        if post_norm:
            call_kernel(step[t.F_NORM_ADD], x, residual, post_norm, n_embd, step[t.EPS])
        else:
            call_kernel(step[t.F_ADD], x, residual, n_embd)
        out = step[t.HEAD_F32] + 4 * place * n_embd
        call_kernel(step[t.F_NORM], x, step[t.OUTPUT_NORM], out, n_embd, step[t.EPS])
        if takes_q8:
            call_kernel(step[t.F_QUANTIZE], out, step[t.HEAD_Q8] + 2 * place * n_embd, 1, n_embd)
        if step[t.BY_SKETCH]:
            call_kernel(step[t.F_LENGTHS], step[t.HEAD_Q8] + 2 * place * n_embd, 1, n_embd)


@inner
def _head_product(step, matrices, first_place, m, member, n_members):
    """Logits of m rows, or bounds of them."""
    head = matrices[len(matrices) - 1]
    n_embd, ld_out = step[t.N_EMBD], step[t.LD_LOGITS]
    kernel, address = head[t.M_ROWS_KERNEL], head[t.M_ADDRESS]
    if step[t.BY_SKETCH]:
        kernel, address = step[t.F_SKETCH], step[t.SKETCH]
    x = step[t.HEAD_F32] + 4 * first_place * n_embd
    if head[t.M_TAKES_Q8]:
        x = step[t.HEAD_Q8] + 2 * first_place * n_embd
    g0, g1 = share(head[t.M_GROUPS], member, n_members)
    if g0 < g1:
        call_kernel(kernel, address, x, step[t.LOGITS], m, n_embd, ld_out, g0, g1)


@inner
def _scan_segments(step, m, member, n_members):
    """Soft cap, block maxima and (of logits) sums of exponentials of m rows, shared by segments."""
    n_logits = step[t.N_LOGITS]
    n_segments = (n_logits + SEGMENT - 1) // SEGMENT
    first, last = share(m * n_segments, member, n_members)
    for unit in range(first, last):
        place, start = unit // n_segments, unit % n_segments * SEGMENT
        n = min(SEGMENT, n_logits - start)
        logits = step[t.LOGITS] + place * step[t.LD_LOGITS] + 4 * start
        if step[t.FINAL_CAP]:
            call_kernel(step[t.F_SOFT_CAP], logits, n, step[t.FINAL_CAP])
        for i in range(max(0, step[t.N_VOCAB] - start), n):
            store_f32(logits, i, float32(MASKED))
        maxima = step[t.MAXIMA] + 4 * ((place * n_logits + start) // BLOCK)
        if step[t.BY_SKETCH]:
            call_kernel(step[t.F_MAXIMA], logits, n, maxima)
        else:
            call_kernel(step[t.F_SCAN], logits, n, maxima, step[t.SEGMENTS] + 8 * unit)


@inner
def _select_rows(step, first_place, m, member, n_members):
    """Results of m rows of logits, shared by rows."""
    n_logits, k = step[t.N_LOGITS], step[t.N_TOP]
    n_segments = (n_logits + SEGMENT - 1) // SEGMENT
    first, last = share(m, member, n_members)
    for i in range(first, last):
        place, logits = first_place + i, step[t.LOGITS] + i * step[t.LD_LOGITS]
        log_sum = math.nan
        if not step[t.BY_SKETCH]:
            log_sum = log_sum_exp(step[t.SEGMENTS] + 8 * i * n_segments, n_segments)
        store_f32(step[t.LOG_SUMS], place, float32(log_sum))
        maxima = step[t.MAXIMA] + 4 * i * (n_logits // BLOCK)
        at = 4 * place * k
        select_top(logits, maxima, step[t.N_VOCAB], k, step[t.TOP_LOGITS] + at, step[t.TOP_IDS] + at)
        full = int64(load_i32(step[t.FULL_PLACES], place))
        if full >= 0:
            call_kernel(step[t.F_COPY], logits, step[t.FULL_OUT] + 4 * full * n_logits, n_logits)


@inner
def step_head(step, layers, matrices, team, member, n_members):
    """Logits of the wanted rows, HEAD_ROWS at a time, and what the caller wants to know of them."""
    _head_inputs(step, layers, matrices, member, n_members)
    for first_place in range(0, step[t.N_OUT], step[t.HEAD_ROWS]):
        m = min(step[t.HEAD_ROWS], step[t.N_OUT] - first_place)
        barrier(team, member)
        _head_product(step, matrices, first_place, m, member, n_members)
        barrier(team, member)
        _scan_segments(step, m, member, n_members)
        barrier(team, member)
        if step[t.BY_SKETCH]:
            read_candidates(step, matrices, first_place, m, team, member, n_members)
            barrier(team, member)
        _select_rows(step, first_place, m, member, n_members)
