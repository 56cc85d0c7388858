"""Every weight type through planar_rows, embed_rows and matmul_rows, against the gguf package's dequantization."""

from __future__ import annotations

import cuda_reference as ref
import numpy as np
import pytest
from cuda_rig import Rig

pytest.importorskip("cuda.core")

from cuda_weights import random_matrix, upload

from llamatrio.backends.cuda.kernels import matmul, rows
from llamatrio.backends.cuda.kernels import weights as w
from llamatrio.backends.cuda.kernels.weights import WeightType

TYPES = list(WeightType)


def decode_rows(rig: Rig, matrix: w.Matrix, x: np.ndarray) -> tuple[rows.Rows, np.ndarray]:
    """x as decode rows on the device, and the values they stand for."""
    if matrix.type.is_float:
        return rows.Rows(rows.RowKind.F32, rig.put(x)), x.astype(np.float64)
    q, meta = ref.quantize_rows(x)
    return rows.Rows(rows.RowKind.Q8, rig.put(q), rig.put(meta)), ref.dequantize_rows(q, meta)


@pytest.mark.parametrize("type", TYPES, ids=lambda t: t.name)
def test_planes_mean_what_the_file_says(cuda_rig: Rig, type: WeightType) -> None:
    """Exact to a rounding or two of float32 (the oracle works in float32 too)."""
    data, weights = random_matrix(type, 7, 512)
    matrix = upload(cuda_rig, type, data, 7, 512)
    tokens = np.array([6, 0, 3, -1, 6], np.int32)
    out = cuda_rig.empty(5 * 512 * 4)
    w.embed_rows(cuda_rig.run, matrix, cuda_rig.put(tokens), out, n_rows=5, scale=2.5)
    found = cuda_rig.get(out, (5, 512), np.float32)
    expected = np.where(tokens[:, None] < 0, 0, weights[tokens] * 2.5)
    assert np.abs(found - expected).max() <= 4e-7 * np.abs(expected).max()


@pytest.mark.parametrize("type", TYPES, ids=lambda t: t.name)
def test_matmul_rows_of_every_type(cuda_rig: Rig, type: WeightType) -> None:
    """Products of the quantized values, to float32 rounding: 3e-6 of the largest sum of magnitudes."""
    data, weights = random_matrix(type, 11, 1280)
    matrix = upload(cuda_rig, type, data, 11, 1280)
    rng = np.random.default_rng(0)
    x, x_value = decode_rows(cuda_rig, matrix, rng.standard_normal((2, 1280)).astype(np.float32))
    bias = rng.standard_normal(11).astype(np.float32)
    out = cuda_rig.empty(2 * 11 * 4)
    matmul.matmul_rows(cuda_rig.run, matrix, x, cuda_rig.put(bias), out, n_rows=2)
    found = cuda_rig.get(out, (2, 11), np.float32)
    bound = 3e-6 * (np.abs(x_value) @ np.abs(weights.T)).max()
    assert np.abs(found - (x_value @ weights.T + bias)).max() < bound


@pytest.mark.parametrize("type", [WeightType.Q4_K, WeightType.F16], ids=lambda t: t.name)
@pytest.mark.parametrize("n_rows", [1, 3, 5, 16, 18])
def test_a_row_is_the_same_in_any_company(cuda_rig: Rig, type: WeightType, n_rows: int) -> None:
    """Bit for bit, whatever number of rows is multiplied at once."""
    data, _ = random_matrix(type, 9, 256)
    matrix = upload(cuda_rig, type, data, 9, 256)
    x = np.random.default_rng(1).standard_normal((18, 256)).astype(np.float32)
    out, one = cuda_rig.empty(n_rows * 9 * 4), cuda_rig.empty(9 * 4)
    matmul.matmul_rows(cuda_rig.run, matrix, decode_rows(cuda_rig, matrix, x[:n_rows])[0], 0, out, n_rows=n_rows)
    found = cuda_rig.get(out, (n_rows, 9), np.float32)
    for r in {0, n_rows // 2, n_rows - 1}:
        alone = decode_rows(cuda_rig, matrix, x[r : r + 1])[0]
        matmul.matmul_rows(cuda_rig.run, matrix, alone, 0, one, n_rows=1)
        assert np.array_equal(cuda_rig.get(one, (9,), np.float32), found[r])


@pytest.mark.parametrize("type", [WeightType.Q8_0, WeightType.BF16], ids=lambda t: t.name)
def test_out_stride_leaves_the_rest_alone(cuda_rig: Rig, type: WeightType) -> None:
    data, weights = random_matrix(type, 6, 64)
    matrix = upload(cuda_rig, type, data, 6, 64)
    x, value = decode_rows(cuda_rig, matrix, np.random.default_rng(3).standard_normal((3, 64)).astype(np.float32))
    out = cuda_rig.put(np.full((3, 11), 7, np.float32))
    matmul.matmul_rows(cuda_rig.run, matrix, x, 0, out + 4 * 2, n_rows=3, out_stride=11)
    found = cuda_rig.get(out, (3, 11), np.float32)
    assert np.allclose(found[:, 2:8], value @ weights.T, rtol=1e-5, atol=1e-4)
    assert (np.delete(found, range(2, 8), axis=1) == 7).all()


@pytest.mark.parametrize("type", [WeightType.Q4_K, WeightType.MXFP4, WeightType.F16], ids=lambda t: t.name)
def test_matmul_expert_rows(cuda_rig: Rig, type: WeightType) -> None:
    n_expert, n_out, k = 4, 10, 256
    data, weights = random_matrix(type, n_expert * n_out, k)
    matrix = upload(cuda_rig, type, data, n_out, k, n_expert)
    each = weights.reshape(n_expert, n_out, k)
    experts = np.array([3, 0, 1, -1, 2, 3], np.int32)
    rng = np.random.default_rng(2)
    bias = rng.standard_normal((n_expert, n_out)).astype(np.float32)
    for share in (2, 1):
        x, x_value = decode_rows(cuda_rig, matrix, rng.standard_normal((6 // share, k)).astype(np.float32))
        out = cuda_rig.put(np.full((6, n_out), 7, np.float32))
        matmul.matmul_expert_rows(
            cuda_rig.run, matrix, x, cuda_rig.put(bias), cuda_rig.put(experts), out, n_pairs=6, share=share
        )
        found = cuda_rig.get(out, (6, n_out), np.float32)
        for p, e in enumerate(experts):
            expected = each[e] @ x_value[p // share] + bias[e] if e >= 0 else np.full(n_out, 7)
            assert np.abs(found[p] - expected).max() < 3e-6 * (np.abs(each[e]) @ np.abs(x_value[p // share])).max()


def test_misuse_is_refused_before_a_launch(cuda_rig: Rig) -> None:
    with pytest.raises(ValueError, match="multiple of 256"):
        w.planes_bytes(WeightType.Q4_K, 1, 288)
    with pytest.raises(ValueError, match="F16"):
        w.planar_rows(cuda_rig.run, 0, 0, type=WeightType.F16, n_rows=1, k=32)
    x = rows.Rows(rows.RowKind.F32, 0)
    with pytest.raises(ValueError, match="expected rows as Q8"):
        matmul.matmul_rows(cuda_rig.run, w.Matrix(WeightType.Q8_0, 0, 1, 32), x, 0, 0, n_rows=1)
