"""The step's matrix products, and how work is shared among the members of the team."""

# Numba infers the types of compiled functions itself.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"

from __future__ import annotations

from llamatrio.backends.cpu import tables as t
from llamatrio.backends.cpu.call import call_kernel
from llamatrio.backends.cpu.native import inner

SLICE_GROUPS = 16
"""Groups of 16 feed-forward columns that the panel path expands at once."""
LD_SLICE = 64 * (SLICE_GROUPS + 1)
"""Bytes between rows of a slice: an odd number of cache lines (see panel.py)."""


@inner
def share(n, member, n_members):
    """The part [first, last) of n things that a member takes."""
    return n * member // n_members, n * (member + 1) // n_members


@inner
def share_groups(n, member, n_members):
    """As share, with even borders: panels take two groups at a time."""
    first, last = share((n + 1) // 2, member, n_members)
    return 2 * first, min(n, 2 * last)


@inner
def is_private(step, n_members):
    """Whether every member keeps all rows of the rows path (see step.py)."""
    return step[t.N_ROWS] <= t.MOST_PRIVATE_ROWS and step[t.N_ROWS] <= 4 * n_members


@inner
def x_row(step, member, n_members, row):
    """Address of a row's residual stream, as this member sees it."""
    size = 4 * step[t.N_EMBD]
    if row < step[t.N_ROWS] and is_private(step, n_members):
        return step[t.X_PRIVATE] + member * step[t.PRIVATE_BYTES] + row * size
    return step[t.X_SHARED] + row * size


@inner
def input_q8(step, member, n_members):
    """Where the products read the rows path's activations in the form q8."""
    if is_private(step, n_members):
        return step[t.INPUT_Q8_PRIVATE] + member * step[t.PRIVATE_BYTES]
    return step[t.INPUT_Q8]


@inner
def input_f32(step, member, n_members):
    """As input_q8, in the form f32."""
    if is_private(step, n_members):
        return step[t.INPUT_F32_PRIVATE] + member * step[t.PRIVATE_BYTES]
    return step[t.INPUT_F32]


@inner
def bf16_row(base, row, k):
    """Address of a row's first block in the form bf16."""
    return base + row // 16 * (k // 32 * 1024) + row % 16 * 64


@inner
def rows_product(step, matrix, x_q8, x_f32, out, ld_out, g0, g1):
    """Columns of groups [g0, g1) of a product, for the rows of the rows path."""
    if step[t.N_ROWS] and g0 < g1:
        x = x_q8 if matrix[t.M_TAKES_Q8] else x_f32
        kernel, address = matrix[t.M_ROWS_KERNEL], matrix[t.M_ADDRESS]
        call_kernel(kernel, address, x, out, step[t.N_ROWS], matrix[t.M_K], ld_out, g0, g1)


@inner
def panel_product(step, matrix, member, x, out, ld_out, g0, g1):
    """Columns of groups [g0, g1) of a product, for the rows of the panel path; `out` is their first row."""
    if step[t.N_PANEL] and g0 < g1:
        scratch = step[t.PANEL_SCRATCH] + member * step[t.PRIVATE_BYTES]
        kernel, address = matrix[t.M_PANEL_KERNEL], matrix[t.M_ADDRESS]
        call_kernel(kernel, address, x, out, scratch, step[t.N_PANEL], matrix[t.M_K], ld_out, g0, g1)


@inner
def product(step, matrix, member, x_q8, x_f32, x_bf16, out, ld_out, g0, g1):
    """Columns of groups [g0, g1) of a product, for the rows of both paths."""
    rows_product(step, matrix, x_q8, x_f32, out, ld_out, g0, g1)
    panel_product(step, matrix, member, x_bf16, out + step[t.N_ROWS] * ld_out, ld_out, g0, g1)


@inner
def project(step, matrices, layer, member, n_members):
    """This member's columns of Q, K and V, which lie side by side in the output."""
    first = layer * t.N_LAYER_MATRICES + t.Q
    q8, f32 = input_q8(step, member, n_members), input_f32(step, member, n_members)
    n_groups = 0
    for i in range(3):
        n_groups += matrices[first + i, t.M_GROUPS]
    g0, g1 = share_groups(n_groups, member, n_members)
    before = 0
    for i in range(3):
        n = matrices[first + i, t.M_GROUPS]
        out = step[t.QKV] + before * 64
        a, b = max(0, g0 - before), min(n, g1 - before)
        product(step, matrices[first + i], member, q8, f32, step[t.INPUT_BF16], out, step[t.LD_QKV], a, b)
        before += n


@inner
def project_out(step, matrices, layer, member, n_members):
    """This member's columns of the attention's output product."""
    index = layer * t.N_LAYER_MATRICES + t.O
    q8, f32 = input_q8(step, member, n_members), input_f32(step, member, n_members)
    g0, g1 = share_groups(matrices[index, t.M_GROUPS], member, n_members)
    out, ld_out = step[t.LAYER_OUT], step[t.LD_LAYER_OUT]
    product(step, matrices[index], member, q8, f32, step[t.INPUT_BF16], out, ld_out, g0, g1)


@inner
def expand(step, matrices, layer, member, n_members):
    """This member's slice of the feed-forward: gate, up, their product, and that in the form that down reads."""
    gate = layer * t.N_LAYER_MATRICES + t.GATE
    g0, g1 = share_groups(step[t.N_FF] // 16, member, n_members)
    if g0 < g1:
        _expand_rows(step, matrices, gate, member, n_members, g0, g1)
    for first in range(g0, g1, SLICE_GROUPS):
        _expand_panel(step, matrices, gate, member, first, min(g1, first + SLICE_GROUPS))


@inner
def _expand_rows(step, matrices, gate, member, n_members, g0, g1):
    n_ff, n, takes_q8 = step[t.N_FF], 16 * (g1 - g0), matrices[gate + 2, t.M_TAKES_Q8]
    q8, f32 = input_q8(step, member, n_members), input_f32(step, member, n_members)
    rows_product(step, matrices[gate], q8, f32, step[t.GATES], 4 * n_ff, g0, g1)
    rows_product(step, matrices[gate + 1], q8, f32, step[t.UPS], 4 * n_ff, g0, g1)
    for row in range(step[t.N_ROWS]):
        at = 4 * (row * n_ff + 16 * g0)
        call_kernel(step[t.F_GATE], step[t.GATES] + at, step[t.UPS] + at, step[t.UPS] + at, n)
        if takes_q8:
            call_kernel(step[t.F_QUANTIZE], step[t.UPS] + at, step[t.HIDDEN_Q8] + 2 * row * n_ff + 32 * g0, 1, n)


@inner
def _expand_panel(step, matrices, gate, member, g0, g1):
    """A few columns at a time, so that what the products leave is still in cache for the activation."""
    gates, ups = step[t.GATE_SLICE] + member * step[t.PRIVATE_BYTES], step[t.UP_SLICE] + member * step[t.PRIVATE_BYTES]
    # The kernels address columns from the first of the matrix.
    panel_product(step, matrices[gate], member, step[t.INPUT_BF16], gates - 64 * g0, LD_SLICE, g0, g1)
    panel_product(step, matrices[gate + 1], member, step[t.INPUT_BF16], ups - 64 * g0, LD_SLICE, g0, g1)
    n = 16 * (g1 - g0)
    for row in range(step[t.N_PANEL]):
        up = ups + row * LD_SLICE
        call_kernel(step[t.F_GATE], gates + row * LD_SLICE, up, up, n)
        call_kernel(step[t.F_BF16], up, bf16_row(step[t.HIDDEN_BF16], row, step[t.N_FF]) + g0 // 2 * 1024, 1, n)


@inner
def contract(step, matrices, layer, member, n_members):
    """This member's columns of the down product."""
    index = layer * t.N_LAYER_MATRICES + t.DOWN
    g0, g1 = share_groups(matrices[index, t.M_GROUPS], member, n_members)
    out, ld_out = step[t.LAYER_OUT], step[t.LD_LAYER_OUT]
    product(step, matrices[index], member, step[t.HIDDEN_Q8], step[t.UPS], step[t.HIDDEN_BF16], out, ld_out, g0, g1)
