"""One step of the transformer, entered by every member of the team at once.

Theory of operation. The products of an internal row r < N_ROWS take the *rows path*: rows kernels with 8-bit (or f32)
activations. Rows behind them take the *panel path*: bf16 panels. A row r < N_LONE attends alone, rows behind these in
spans. Both depend on a row's own sequence alone (plan.py), and no result depends on other rows, on the number of
members, or on who computes it. Where there are panels N_LONE is N_ROWS, elsewhere N_ROWS is all rows.

The phases of a layer, each ending at a barrier:
    1  norm       residual add, RMS norm, activations into the form that the products read
    2  project    Q, K, V
    3  rotate     biases, head norms, rotary embedding; K and V into their cells
    4  attend     chunks of rows, or whole rows, of a batch of heads at a time
    5  collect    the attention's outputs into the form that the products read
    6  output     the attention's output product
    7  norm       as 1, for the feed-forward
    8  expand     gate and up products of a slice of columns, activation, form
    9  contract   the down product
A product is shared by columns, everything else by rows or heads.

Few rows (*private* mode): every member does 1, 5 and 7 for all rows, on its own copy of the residual stream. That
costs less than the barrier it saves. Otherwise each row has an owner, who keeps its residual stream.
"""

# Numba infers the types of compiled functions itself.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return, attr-defined"

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numba
from numba import njit

from llamatrio.backends.cpu import tables as t
from llamatrio.backends.cpu.attend import attend_by_tickets, attend_chunks, finish_chunks, rotate_and_store
from llamatrio.backends.cpu.call import call_kernel
from llamatrio.backends.cpu.head import step_head
from llamatrio.backends.cpu.levels import configure_numba
from llamatrio.backends.cpu.native import inner, load_i32
from llamatrio.backends.cpu.products import (
    bf16_row,
    contract,
    expand,
    input_f32,
    input_q8,
    is_private,
    project,
    project_out,
    share,
    x_row,
)
from llamatrio.backends.cpu.team import N_MEMBERS, await_post, barrier, constant, post, reset_tickets

log = logging.getLogger(__name__)


@inner
def _own_rows(step, member, n_members):
    """Rows of the rows path whose residual stream this member keeps."""
    if is_private(step, n_members):
        return 0, step[t.N_ROWS]
    return share(step[t.N_ROWS], member, n_members)


@inner
def _own_panel(step, member, n_members):
    """Rows of the panel path whose residual stream this member keeps."""
    first, last = share(step[t.N_PANEL], member, n_members)
    return step[t.N_ROWS] + first, step[t.N_ROWS] + last


@inner
def _embed(step, member, n_members, first, last):
    for row in range(first, last):
        x = x_row(step, member, n_members, row)
        call_kernel(step[t.F_EMBED], step[t.EMBEDDING], load_i32(step[t.TOKENS], row), x, step[t.N_EMBD])
        if step[t.EMBD_SCALE]:
            call_kernel(step[t.F_SCALE], x, step[t.N_EMBD], step[t.EMBD_SCALE])


@inner
def _norm_row(step, member, n_members, row, residual_norm, has_residual, norm, out):
    """Adds the last product to a row's residual stream and writes its norm to `out`."""
    n_embd = step[t.N_EMBD]
    x = x_row(step, member, n_members, row)
    residual = step[t.LAYER_OUT] + row * step[t.LD_LAYER_OUT]
    if has_residual > 0 and residual_norm:
        call_kernel(step[t.F_NORM_ADD], x, residual, residual_norm, n_embd, step[t.EPS])
    elif has_residual > 0:
        call_kernel(step[t.F_ADD], x, residual, n_embd)
    call_kernel(step[t.F_NORM], x, norm, out, n_embd, step[t.EPS])


@inner
def _norm(step, matrices, reader, n_readers, team, member, n_members, residual_norm, has_residual, norm):
    """Residual add and norm of all rows, in the forms that the products from `reader` on read."""
    n_embd, takes_q8 = step[t.N_EMBD], 0
    for i in range(n_readers):
        takes_q8 |= matrices[reader + i, t.M_TAKES_Q8]
    first, last = _own_rows(step, member, n_members)
    for row in range(first, last):
        out = input_f32(step, member, n_members) + 4 * row * n_embd
        _norm_row(step, member, n_members, row, residual_norm, has_residual, norm, out)
        if takes_q8:
            call_kernel(step[t.F_QUANTIZE], out, input_q8(step, member, n_members) + 2 * row * n_embd, 1, n_embd)
    first, last = _own_panel(step, member, n_members)
    for row in range(first, last):
        out = step[t.ROW_SCRATCH] + member * step[t.PRIVATE_BYTES]
        _norm_row(step, member, n_members, row, residual_norm, has_residual, norm, out)
        call_kernel(step[t.F_BF16], out, bf16_row(step[t.INPUT_BF16], row - step[t.N_ROWS], n_embd), 1, n_embd)
    _meet_unless_private(step, team, member, n_members)


@inner
def _meet_unless_private(step, team, member, n_members):
    if step[t.N_PANEL] or not is_private(step, n_members):
        barrier(team, member)


@inner
def _attend(step, layers, layer, batches, team, member, n_members):
    first, last = 0, step[t.N_ROWS] + step[t.N_PANEL]
    if step[t.BY_CHUNKS]:
        attend_chunks(step, layers, layer, batches, member, n_members)
        first = step[t.N_LONE]
    if step[t.N_SPANS]:
        last = step[t.N_LONE]
    attend_by_tickets(step, layers, layer, batches, member, first, last - first)
    barrier(team, member)


@inner
def _collect(step, layers, matrices, layer, team, member, n_members):
    """The attention's outputs in the form that its output product reads."""
    width = step[t.N_HEAD] * step[t.HEAD_DIM]
    takes_q8 = matrices[layer * t.N_LAYER_MATRICES + t.O, t.M_TAKES_Q8]
    first, last = _own_rows(step, member, n_members)
    for row in range(first, last):
        out = input_f32(step, member, n_members) + 4 * row * width
        if step[t.BY_CHUNKS] and row < step[t.N_LONE]:
            finish_chunks(step, layers, layer, member, row, out)
        else:
            call_kernel(step[t.F_COPY], step[t.ATTN_OUT] + 4 * row * width, out, width)
        if takes_q8:
            call_kernel(step[t.F_QUANTIZE], out, input_q8(step, member, n_members) + 2 * row * width, 1, width)
    first, last = _own_panel(step, member, n_members)
    for row in range(first, last):
        out = bf16_row(step[t.INPUT_BF16], row - step[t.N_ROWS], width)
        call_kernel(step[t.F_BF16], step[t.ATTN_OUT] + 4 * row * width, out, 1, width)
    _meet_unless_private(step, team, member, n_members)


@inner
def _layer(step, layers, matrices, batches, layer, team, member, n_members):
    first_matrix = layer * t.N_LAYER_MATRICES
    before = layers[max(0, layer - 1), t.POST_FFN_NORM]
    _norm(step, matrices, first_matrix + t.Q, 3, team, member, n_members, before, layer, layers[layer, t.ATTN_NORM])
    if member == 0:
        reset_tickets(team)
    project(step, matrices, layer, member, n_members)
    barrier(team, member)
    rotate_and_store(step, layers, layer, member, n_members)
    barrier(team, member)
    _attend(step, layers, layer, batches, team, member, n_members)
    _collect(step, layers, matrices, layer, team, member, n_members)
    project_out(step, matrices, layer, member, n_members)
    barrier(team, member)
    post_norm, norm = layers[layer, t.POST_ATTN_NORM], layers[layer, t.FFN_NORM]
    _norm(step, matrices, first_matrix + t.GATE, 2, team, member, n_members, post_norm, 1, norm)
    expand(step, matrices, layer, member, n_members)
    barrier(team, member)
    contract(step, matrices, layer, member, n_members)
    barrier(team, member)


@inner
def _run(step, layers, matrices, batches, team, member):
    n_members = constant(team, N_MEMBERS)
    first, last = _own_rows(step, member, n_members)
    _embed(step, member, n_members, first, last)
    first, last = _own_panel(step, member, n_members)
    _embed(step, member, n_members, first, last)
    for layer in range(step[t.N_LAYER]):
        _layer(step, layers, matrices, batches, layer, team, member, n_members)
    if step[t.N_OUT]:
        step_head(step, layers, matrices, team, member, n_members)
    barrier(team, member)


def _enter(step, layers, matrices, batches, team, desk, member):
    """Member 0 (the compute thread): waits for a step on the desk and runs it with the team; 0 when there will be
    none. Others: run every step that is posted, until the team stops."""
    if member == 0:
        if not await_post(desk, 1):
            return 0
        post(team)
        _run(step, layers, matrices, batches, team, member)
        return 1
    while await_post(team, member):
        _run(step, layers, matrices, batches, team, member)
    return 0


def _post(team):
    post(team)


class CompiledStep(NamedTuple):
    """Compiled functions (or from the cache on disk)."""

    enter: Callable[..., int]
    """(step, layers, matrices, batches, team address, desk address, member), without the GIL."""
    post: Callable[[int], None]
    """(address): member 0 of a team lets the others go on."""


@cache
def compiled_step() -> CompiledStep:
    """The step for any model, compiled for this machine."""
    configure_numba()
    if not Path(numba.config.CACHE_DIR).exists():
        log.info("compiling the CPU step, once for this machine: about ten seconds")
    table = "int64[:, ::1]"
    signature = f"int64(int64[::1], {table}, {table}, {table}, int64, int64, int64)"
    return CompiledStep(
        njit(signature, nogil=True, cache=True)(_enter), njit("void(int64)", nogil=True, cache=True)(_post)
    )
