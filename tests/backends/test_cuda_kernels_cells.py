"""gather_cells and scatter_cells: exact bytes, any list of cells, one launch."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_rig import Rig


def pool_of(n_cells: int, n_layer: int, k_row: int, v_row: int) -> np.ndarray:
    return np.random.default_rng(5).integers(0, 256, n_layer * n_cells * (k_row + v_row), np.uint8)


def gather_cells(pool: np.ndarray, cells: np.ndarray, n_cells: int, n_layer: int, k_row: int, v_row: int) -> np.ndarray:
    layers = pool.reshape(n_layer, -1)
    k = layers[:, : n_cells * k_row].reshape(n_layer, n_cells, k_row)
    v = layers[:, n_cells * k_row :].reshape(n_layer, n_cells, v_row)
    return np.concatenate([k[:, cells], v[:, cells]], -1).transpose(1, 0, 2).reshape(len(cells), -1)


SHAPES = [(7, 1, 16, 16), (40, 3, 272, 144), (64, 5, 4112, 2048)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n", [1, 7])
def test_gather_packs_scattered_cells(cuda_rig: Rig, shape: tuple[int, int, int, int], n: int) -> None:
    from llamatrio.backends.cuda.kernels import cells as k

    pool, cells = pool_of(*shape), np.random.default_rng(n).permutation(shape[0])[:n].astype(np.int32)
    expected = gather_cells(pool, cells, *shape)
    records = cuda_rig.empty(expected.nbytes)
    k.gather_cells(cuda_rig.run, cuda_rig.put(pool), cuda_rig.put(cells), records, n=n, shape=k.PoolShape(*shape))
    assert np.array_equal(cuda_rig.get(records, expected.shape, np.uint8), expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_scatter_writes_only_its_cells(cuda_rig: Rig, shape: tuple[int, int, int, int]) -> None:
    from llamatrio.backends.cuda.kernels import cells as k

    pool, cells = pool_of(*shape), np.random.default_rng(1).permutation(shape[0])[:5].astype(np.int32)
    everything = np.arange(shape[0])
    records = np.random.default_rng(2).integers(0, 256, (5, shape[1] * (shape[2] + shape[3])), np.uint8)
    before = gather_cells(pool, everything, *shape)
    there = cuda_rig.put(pool)
    k.scatter_cells(cuda_rig.run, there, cuda_rig.put(cells), cuda_rig.put(records), n=5, shape=k.PoolShape(*shape))
    after = gather_cells(cuda_rig.get(there, pool.shape, np.uint8), everything, *shape)
    before[cells] = records
    assert np.array_equal(after, before)


def test_row_bytes_must_be_vectors() -> None:
    k = pytest.importorskip("llamatrio.backends.cuda.kernels.cells")
    with pytest.raises(ValueError, match="k_row_bytes"):
        k.PoolShape(4, 1, 20, 16)
