"""The step's matrix products, and how work is shared among the members of the team."""

# Numba infers the types of compiled functions itself.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return"

from __future__ import annotations

from numba import njit

from llamatrio.backends.cpu import tables as t
from llamatrio.backends.cpu.call import call_kernel


@njit
def share(n, member, n_members):
    """The part [first, last) of n things that a member takes."""
    return n * member // n_members, n * (member + 1) // n_members


@njit
def share_groups(n, member, n_members):
    """As share, with even borders: panels take two groups at a time."""
    first, last = share((n + 1) // 2, member, n_members)
    return 2 * first, min(n, 2 * last)


@njit
def is_private(step, n_members):
    """Whether every member keeps all rows of the rows path (see step.py)."""
    return step[t.N_ROWS] <= t.MOST_PRIVATE_ROWS and step[t.N_ROWS] <= 4 * n_members


@njit
def x_row(step, member, n_members, row):
    """Address of a row's residual stream, as this member sees it."""
    size = 4 * step[t.N_EMBD]
    if row < step[t.N_ROWS] and is_private(step, n_members):
        return step[t.X_PRIVATE] + member * step[t.PRIVATE_BYTES] + row * size
    return step[t.X_SHARED] + row * size


@njit
def input_q8(step, member, n_members):
    """Where the products read the rows path's activations in the form q8."""
    if is_private(step, n_members):
        return step[t.INPUT_Q8_PRIVATE] + member * step[t.PRIVATE_BYTES]
    return step[t.INPUT_Q8]


@njit
def input_f32(step, member, n_members):
    """As input_q8, in the form f32."""
    if is_private(step, n_members):
        return step[t.INPUT_F32_PRIVATE] + member * step[t.PRIVATE_BYTES]
    return step[t.INPUT_F32]


@njit
def bf16_row(base, row, k):
    """Address of a row's first block in the form bf16."""
    return base + row // 16 * (k // 32 * 1024) + row % 16 * 64


@njit
def product(step, matrices, index, member, x_q8, x_f32, x_bf16, out, ld_out, g0, g1):
    """Columns of groups [g0, g1) of a product, for the rows of both paths."""
    if g0 >= g1:
        return
    matrix = matrices[index]
    k, address = matrix[t.M_K], matrix[t.M_ADDRESS]
    n_rows, n_panel = step[t.N_ROWS], step[t.N_PANEL]
    if n_rows:
        x = x_q8 if matrix[t.M_TAKES_Q8] else x_f32
        call_kernel(matrix[t.M_ROWS_KERNEL], address, x, out, n_rows, k, ld_out, g0, g1)
    if n_panel:
        scratch = step[t.PANEL_SCRATCH] + member * step[t.PRIVATE_BYTES]
        below = out + n_rows * ld_out
        call_kernel(matrix[t.M_PANEL_KERNEL], address, x_bf16, below, scratch, n_panel, k, ld_out, g0, g1)


@njit
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
        product(step, matrices, first + i, member, q8, f32, step[t.INPUT_BF16], out, 64 * n_groups, a, b)
        before += n


@njit
def project_out(step, matrices, layer, member, n_members):
    """This member's columns of the attention's output product."""
    index = layer * t.N_LAYER_MATRICES + t.O
    q8, f32 = input_q8(step, member, n_members), input_f32(step, member, n_members)
    g0, g1 = share_groups(matrices[index, t.M_GROUPS], member, n_members)
    ld_out = 4 * step[t.N_EMBD]
    product(step, matrices, index, member, q8, f32, step[t.INPUT_BF16], step[t.LAYER_OUT], ld_out, g0, g1)


@njit
def expand(step, matrices, layer, member, n_members):
    """This member's slice of the feed-forward: gate, up, their product, and that in the form that down reads."""
    n_ff = step[t.N_FF]
    gate = layer * t.N_LAYER_MATRICES + t.GATE
    q8, f32, bf16 = input_q8(step, member, n_members), input_f32(step, member, n_members), step[t.INPUT_BF16]
    g0, g1 = share_groups(n_ff // 16, member, n_members)
    product(step, matrices, gate, member, q8, f32, bf16, step[t.GATES], 4 * n_ff, g0, g1)
    product(step, matrices, gate + 1, member, q8, f32, bf16, step[t.UPS], 4 * n_ff, g0, g1)
    n, takes_q8 = 16 * (g1 - g0), matrices[gate + 2, t.M_TAKES_Q8]
    if n <= 0:
        return
    for row in range(step[t.N_ROWS] + step[t.N_PANEL]):
        at = 4 * (row * n_ff + 16 * g0)
        call_kernel(step[t.F_GATE], step[t.GATES] + at, step[t.UPS] + at, step[t.UPS] + at, n)
        if row >= step[t.N_ROWS]:
            out = bf16_row(step[t.HIDDEN_BF16], row - step[t.N_ROWS], n_ff) + g0 // 2 * 1024
            call_kernel(step[t.F_BF16], step[t.UPS] + at, out, 1, n)
        elif takes_q8:
            call_kernel(step[t.F_QUANTIZE], step[t.UPS] + at, step[t.HIDDEN_Q8] + 2 * row * n_ff + 32 * g0, 1, n)


@njit
def contract(step, matrices, layer, member, n_members):
    """This member's columns of the down product."""
    index = layer * t.N_LAYER_MATRICES + t.DOWN
    g0, g1 = share_groups(matrices[index, t.M_GROUPS], member, n_members)
    q8, bf16, ld_out = step[t.HIDDEN_Q8], step[t.HIDDEN_BF16], 4 * step[t.N_EMBD]
    product(step, matrices, index, member, q8, step[t.UPS], bf16, step[t.LAYER_OUT], ld_out, g0, g1)
