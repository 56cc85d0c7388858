"""matmul_tile, every weight type and tile size, and the experts' plan that feeds it."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_rig import Rig

pytest.importorskip("cuda.core")

from cuda_weights import random_matrix, upload

from llamatrio.backends.cuda.kernels import experts as e
from llamatrio.backends.cuda.kernels import matmul, rows
from llamatrio.backends.cuda.kernels.weights import WeightType


def prompt_rows(rig: Rig, x: np.ndarray) -> tuple[rows.Rows, np.ndarray]:
    """x as scaled halves on the device, and the values they stand for."""
    scale = np.exp2(np.floor(np.log2(np.abs(x).max(-1, keepdims=True))) - 14).astype(np.float32)
    half = (x / scale).astype(np.float16)
    return rows.Rows(rows.RowKind.F16, rig.put(half), rig.put(scale)), half * scale.astype(np.float64)


def close(found: np.ndarray, x: np.ndarray, w: np.ndarray, bias: np.ndarray | float) -> None:
    """Weights are rounded to f16 and the sums are f32: 2^-11 of each product, added up as they come."""
    bound = 2.0**-11 * np.sqrt((x * x) @ (w * w).T) * 4 + 2e-6 * (np.abs(x) @ np.abs(w.T))
    assert (np.abs(found - (x @ w.T + bias)) <= bound).all()


@pytest.mark.parametrize("type", list(WeightType), ids=lambda t: t.name)
def test_matmul_tile_of_every_type(cuda_rig: Rig, type: WeightType) -> None:
    """Five rows, and columns that end within a second block's first warp."""
    data, weights = random_matrix(type, 131, 512)
    matrix = upload(cuda_rig, type, data, 131, 512)
    rng = np.random.default_rng(0)
    x, value = prompt_rows(cuda_rig, rng.standard_normal((5, 512)).astype(np.float32))
    bias = rng.standard_normal(131).astype(np.float32)
    out = cuda_rig.empty(5 * 131 * 4)
    matmul.matmul_tile(cuda_rig.run, matrix, x, cuda_rig.put(bias), out, n_rows=5)
    close(cuda_rig.get(out, (5, 131), np.float32), value, weights.astype(np.float64), bias)


@pytest.mark.parametrize("n_rows", [1, 16, 17, 64, 65, 130])
def test_a_row_is_the_same_in_any_tile(cuda_rig: Rig, n_rows: int) -> None:
    """Bit for bit over tiles of 16, 64 and 128 rows; magnitudes far beyond a half's."""
    data, weights = random_matrix(WeightType.Q4_0, 40, 96)
    matrix = upload(cuda_rig, WeightType.Q4_0, data, 40, 96)
    x_in = np.random.default_rng(1).standard_normal((n_rows, 96)).astype(np.float32)
    x_in *= np.logspace(-6, 9, n_rows, dtype=np.float32)[:, None]
    x, value = prompt_rows(cuda_rig, x_in)
    out, one = cuda_rig.empty(n_rows * 40 * 4), cuda_rig.empty(40 * 4)
    matmul.matmul_tile(cuda_rig.run, matrix, x, 0, out, n_rows=n_rows)
    found = cuda_rig.get(out, (n_rows, 40), np.float32)
    close(found, value, weights.astype(np.float64), 0.0)
    alone = prompt_rows(cuda_rig, x_in[-1:])[0]
    matmul.matmul_tile(cuda_rig.run, matrix, alone, 0, one, n_rows=1)
    assert np.array_equal(cuda_rig.get(one, (40,), np.float32), found[-1])


def test_products_side_by_side(cuda_rig: Rig) -> None:
    """Two matrices of different types fill their columns of one buffer, and nothing else."""
    n, k = 18, 64
    x, value = prompt_rows(cuda_rig, np.random.default_rng(5).standard_normal((n, k)).astype(np.float32))
    expected, out = [], cuda_rig.put(np.full((n, 40), 7, np.float32))
    for type, at, n_out in ((WeightType.Q8_0, 0, 20), (WeightType.Q5_1, 24, 12)):
        data, weights = random_matrix(type, n_out, k)
        matrix = upload(cuda_rig, type, data, n_out, k)
        matmul.matmul_tile(cuda_rig.run, matrix, x, 0, out + 4 * at, n_rows=n, out_stride=40)
        expected.append((at, weights.astype(np.float64)))
    found = cuda_rig.get(out, (n, 40), np.float32)
    for at, weights in expected:
        close(found[:, at : at + len(weights)], value, weights, 0.0)
    assert (found[:, 20:24] == 7).all()
    assert (found[:, 36:] == 7).all()


def test_matmul_tile_on_turing(turing_rig: Rig) -> None:
    data, weights = random_matrix(WeightType.Q5_K, 40, 256)
    matrix = upload(turing_rig, WeightType.Q5_K, data, 40, 256)
    x, value = prompt_rows(turing_rig, np.random.default_rng(6).standard_normal((20, 256)).astype(np.float32))
    out = turing_rig.empty(20 * 40 * 4)
    matmul.matmul_tile(turing_rig.run, matrix, x, 0, out, n_rows=20)
    close(turing_rig.get(out, (20, 40), np.float32), value, weights.astype(np.float64), 0.0)


def plan_of(rig: Rig, experts: np.ndarray, n_expert: int, tile_rows: int) -> e.ExpertPlan:
    n_tiles = e.plan_tiles(experts.size, n_expert, tile_rows)
    plan = e.ExpertPlan(rig.empty(experts.size * 4), rig.empty(n_tiles * 16), n_tiles, tile_rows)
    e.moe_plan(rig.run, rig.put(experts), plan, n_pairs=experts.size, n_expert=n_expert)
    return plan


@pytest.mark.parametrize(("n_pairs", "n_expert"), [(1, 4), (50, 3), (200, 130)])
def test_moe_plan_sorts_pairs_and_covers_each_once(cuda_rig: Rig, n_pairs: int, n_expert: int) -> None:
    experts = np.random.default_rng(2).integers(-1, n_expert, n_pairs).astype(np.int32)
    plan = plan_of(cuda_rig, experts, n_expert, 16)
    pairs = np.flatnonzero(experts >= 0)
    by_expert = pairs[np.argsort(experts[pairs], kind="stable")]
    tiles = cuda_rig.get(plan.tiles, (plan.n_tiles, 4), np.int32)
    if len(pairs):
        assert np.array_equal(cuda_rig.get(plan.order, (n_pairs,), np.int32)[: len(pairs)], by_expert)
    covered = []
    for expert, first, count, _ in tiles:
        assert count <= 16
        assert (experts[by_expert[first : first + count]] == expert).all()
        covered += range(first, first + count)
    assert covered == list(range(len(pairs)))


@pytest.mark.parametrize("type", [WeightType.MXFP4, WeightType.Q6_K], ids=lambda t: t.name)
def test_matmul_expert_tile(cuda_rig: Rig, type: WeightType) -> None:
    n_expert, n_out, k, n_used = 5, 33, 256, 3
    data, weights = random_matrix(type, n_expert * n_out, k)
    matrix = upload(cuda_rig, type, data, n_out, k, n_expert)
    each, rng = weights.reshape(n_expert, n_out, k).astype(np.float64), np.random.default_rng(3)
    experts = np.stack([rng.permutation(n_expert)[:n_used] for _ in range(21)]).astype(np.int32)
    experts[4] = -1
    bias = rng.standard_normal((n_expert, n_out)).astype(np.float32)
    plan = plan_of(cuda_rig, experts, n_expert, 16)
    for share in (n_used, 1):
        x, value = prompt_rows(cuda_rig, rng.standard_normal((63 // share, k)).astype(np.float32))
        out = cuda_rig.put(np.full((63, n_out), 7, np.float32))
        matmul.matmul_expert_tile(cuda_rig.run, matrix, x, cuda_rig.put(bias), plan, out, n_pairs=63, share=share)
        found = cuda_rig.get(out, (63, n_out), np.float32)
        for p, expert in enumerate(experts.reshape(-1)):
            if expert < 0:
                assert (found[p] == 7).all()
            else:
                close(found[p : p + 1], value[p // share][None], each[expert], bias[expert])
