"""Mixture of experts: `moe_route` chooses, `moe_plan` sorts a prompt's pairs into tiles, `moe_sum` joins.

A pair is (row, one of its experts): pair p = row * n_used + j. The products themselves are matmul_expert_rows (decode)
and matmul_expert_tile (prompts).
"""

from __future__ import annotations

from typing import NamedTuple

from llamatrio.backends.cuda.kernels.launcher import (
    WARP,
    DevicePointer,
    Launcher,
    i32,
    require_multiple,
    whole_warps,
)

MAX_EXPERTS = 256


class ExpertPlan(NamedTuple):
    """The pairs of a prompt's rows, sorted by expert and cut into tiles."""

    order: DevicePointer
    """i32 [n_pairs]"""
    tiles: DevicePointer
    """int4 [n_tiles]: (expert, first, count, 0)"""
    n_tiles: int
    tile_rows: int
    """16, 64 or 128"""


def plan_tiles(n_pairs: int, n_expert: int, tile_rows: int) -> int:
    """Tiles that suffice however the pairs fall: a part-filled one for each expert that has any."""
    return n_pairs // tile_rows + min(n_pairs, n_expert)


def moe_route(
    run: Launcher,
    logits: DevicePointer,
    positions: DevicePointer,
    experts: DevicePointer,
    weights: DevicePointer,
    *,
    n_rows: int,
    n_expert: int,
    n_used: int,
) -> None:
    """experts i32, weights f32 [n_rows, n_used]: the largest of logits f32 [n_rows, n_expert], softmax over just them.

    positions i32 [n_rows]: a negative one is padding: experts -1, weights 0.
    """
    if not 1 <= n_used <= n_expert <= MAX_EXPERTS:
        raise ValueError(f"expected 1 <= n_used <= n_expert <= {MAX_EXPERTS}, not {n_used} of {n_expert}")
    pointers, sizes = (logits, positions, experts, weights), (i32(n_rows), i32(n_expert), i32(n_used))
    run("moe_route", (-(-n_rows // 4),), 128, *pointers, *sizes, PER_LANE=-(-n_expert // WARP))


def moe_plan(run: Launcher, experts: DevicePointer, plan: ExpertPlan, *, n_pairs: int, n_expert: int) -> None:
    """Fills the plan from experts i32 [n_pairs]; pairs of a negative expert are left out."""
    if plan.n_tiles < plan_tiles(n_pairs, n_expert, plan.tile_rows):
        raise ValueError(f"expected plan_tiles() tiles, not {plan.n_tiles}")
    sizes = (i32(n_pairs), i32(n_expert), i32(plan.n_tiles), i32(plan.tile_rows))
    run("moe_plan", (1,), 1024, experts, plan.order, plan.tiles, *sizes)


def moe_sum(
    run: Launcher,
    y: DevicePointer,
    weights: DevicePointer,
    out: DevicePointer,
    *,
    n_rows: int,
    k: int,
    n_used: int,
) -> None:
    """out f32 [n_rows, k] = the pairs' rows y f32 [n_rows * n_used, k] times their weights, summed by row."""
    require_multiple("k", k, 4)
    threads = whole_warps(k // 4, 256)
    run("moe_sum", (n_rows, -(-k // 4 // threads)), threads, y, weights, out, i32(k), i32(n_used))
