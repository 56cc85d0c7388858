"""top_k and moe_route: what is chosen, in which order, and the weights that go with it."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_rig import Rig

pytest.importorskip("cuda.core")

from llamatrio.backends.cuda.kernels import experts as e
from llamatrio.backends.cuda.kernels import top_k as t


def run_top_k(rig: Rig, logits: np.ndarray, k: int, softcap: float) -> tuple[np.ndarray, ...]:
    n, n_vocab = logits.shape
    there = rig.put(logits)
    scratch = [rig.empty(size) for size in t.scratch_bytes(n, n_vocab, k)]
    out = [rig.empty(n * k * 4), rig.empty(n * k * 4), rig.empty(n * 4)]
    t.top_k(rig.run, there, *scratch, *out, n_rows=n, n_vocab=n_vocab, k=k, softcap=softcap)
    return (
        rig.get(out[0], (n, k), np.int32),
        rig.get(out[1], (n, k), np.float32),
        rig.get(out[2], (n,), np.float32),
        rig.get(there, logits.shape, np.float32),
    )


@pytest.mark.parametrize(("n_vocab", "k"), [(1, 1), (40, 40), (4096, 1), (4097, 5), (9000, 64)])
def test_top_k(cuda_rig: Rig, n_vocab: int, k: int) -> None:
    """Many equal logits, among them over slices, and both zeros: the lower id comes first."""
    logits = np.random.default_rng(n_vocab).integers(-6, 5, (2, n_vocab)).astype(np.float32)
    logits[1] *= -0.0 if n_vocab == 40 else 7.0
    ids, values, logsumexp, after = run_top_k(cuda_rig, logits, k, 0.0)
    expected = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    assert np.array_equal(ids, expected)
    assert np.array_equal(values, np.take_along_axis(logits, expected, 1))
    wide = logits.astype(np.float64)
    top = wide.max(1)
    assert np.allclose(logsumexp, top + np.log(np.exp(wide - top[:, None]).sum(1)), rtol=2e-6, atol=2e-6)
    assert np.array_equal(after, logits)


def test_top_k_caps_logits_in_place(cuda_rig: Rig) -> None:
    logits = np.random.default_rng(0).standard_normal((2, 5000)).astype(np.float32) * 40
    ids, values, _, after = run_top_k(cuda_rig, logits, 3, 30.0)
    capped = 30 * np.tanh(logits.astype(np.float64) / 30)
    assert np.abs(after - capped).max() < 2e-5
    assert np.array_equal(values, np.take_along_axis(after, ids, 1))
    assert np.array_equal(ids, np.argsort(-after, axis=1, kind="stable")[:, :3])


def test_top_k_misuse() -> None:
    with pytest.raises(ValueError, match="expected k"):
        t.top_k(None, 0, 0, 0, 0, 0, 0, n_rows=1, n_vocab=10, k=11, softcap=0.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="vocabulary"):
        t.top_k(None, 0, 0, 0, 0, 0, 0, n_rows=1, n_vocab=2**21, k=1, softcap=0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(("n_expert", "n_used"), [(4, 4), (32, 4), (128, 8), (130, 1)])
def test_moe_route(cuda_rig: Rig, n_expert: int, n_used: int) -> None:
    """Equal logits take the lower expert; a row of padding takes none."""
    logits = np.random.default_rng(1).integers(-3, 3, (6, n_expert)).astype(np.float32)
    logits[2:] += np.random.default_rng(2).standard_normal((4, n_expert)).astype(np.float32)
    positions = np.array([0, 5, 9, -1, 1, 2], np.int32)
    experts, weights = cuda_rig.empty(6 * n_used * 4), cuda_rig.empty(6 * n_used * 4)
    e.moe_route(
        cuda_rig.run, cuda_rig.put(logits), cuda_rig.put(positions), experts, weights,
        n_rows=6, n_expert=n_expert, n_used=n_used,
    )  # fmt: skip
    found = cuda_rig.get(experts, (6, n_used), np.int32)
    expected = np.argsort(-logits, axis=1, kind="stable")[:, :n_used]
    expected[3] = -1
    assert np.array_equal(found, expected)
    chosen = np.take_along_axis(logits.astype(np.float64), np.maximum(expected, 0), 1)
    p = np.exp(chosen - chosen.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[3] = 0
    assert np.abs(cuda_rig.get(weights, (6, n_used), np.float32) - p).max() < 1e-6


def test_moe_sum_skips_what_was_never_written(cuda_rig: Rig) -> None:
    y = np.random.default_rng(3).standard_normal((3, 2, 36)).astype(np.float32)
    y[1] = np.nan
    weights = np.array([[0.25, 0.75], [0, 0], [1, 0.5]], np.float32)
    out = cuda_rig.empty(3 * 36 * 4)
    e.moe_sum(cuda_rig.run, cuda_rig.put(y), cuda_rig.put(weights), out, n_rows=3, k=36, n_used=2)
    expected = np.einsum("rj,rjk->rk", weights, np.nan_to_num(y))
    assert np.abs(cuda_rig.get(out, (3, 36), np.float32) - expected).max() < 1e-6
