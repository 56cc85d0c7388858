"""Row kernels: norms, activations, conversions, and rope with the KV store, against float64 formulas."""

from __future__ import annotations

import cuda_reference as ref
import numpy as np
import pytest
from cuda_rig import Rig

pytest.importorskip("cuda.core")

from llamatrio.backends.cpu.reference import hadamard_blocks
from llamatrio.backends.cuda.kernels import rows as k
from llamatrio.model.rope import rope_frequencies
from llamatrio.model.spec import RopeSpec, mixes_keys

KINDS = list(k.RowKind)


def emitted(rig: Rig, to: k.Rows, n: int, width: int) -> np.ndarray:
    """The values that emitted rows stand for."""
    if to.kind is k.RowKind.F32:
        return rig.get(to.out, (n, width), np.float32)
    if to.kind is k.RowKind.Q8:
        return ref.dequantize_rows(rig.get(to.out, (n, width), np.int8), rig.get(to.extra, (n, width // 32), ref.META))
    return rig.get(to.out, (n, width), np.float16) * rig.get(to.extra, (n, 1), np.float32).astype(np.float64)


def room(rig: Rig, kind: k.RowKind, n: int, width: int) -> k.Rows:
    out, extra = k.row_bytes(kind, width)
    return k.Rows(kind, rig.empty(n * out), rig.empty(n * extra))


def close(kind: k.RowKind, found: np.ndarray, expected: np.ndarray) -> None:
    """f32 to 2e-6 of the row's largest value, f16 to 2^-11 of each value, int8 to half a step of its block."""
    top = np.abs(expected).max(-1, keepdims=True) + 1e-30
    if kind is k.RowKind.Q8:
        blocks = expected.reshape(len(expected), -1, 32)
        step = np.repeat(np.abs(blocks).max(-1) / 127, 32, -1)
        assert (np.abs(found - expected) <= 0.5001 * step + 2e-6 * top).all()
        return
    each = np.abs(expected) * 2.0**-11 if kind is k.RowKind.F16 else 0
    assert (np.abs(found - expected) <= each + 2e-6 * top).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "width"), [(1, 32), (3, 96), (2, 2080)])
def test_rms_norm_adds_and_emits(cuda_rig: Rig, kind: k.RowKind, n: int, width: int) -> None:
    rng = np.random.default_rng(width)
    x, delta = rng.standard_normal((2, n, width)).astype(np.float32)
    weight = rng.standard_normal(width).astype(np.float32)
    there, to = cuda_rig.put(x), room(cuda_rig, kind, n, width)
    k.rms_norm(cuda_rig.run, there, cuda_rig.put(delta), cuda_rig.put(weight), to, n_rows=n, k=width, eps=1e-5)
    close(kind, emitted(cuda_rig, to, n, width), ref.rms_norm(x, delta, weight, 1e-5))
    assert np.array_equal(cuda_rig.get(there, x.shape, np.float32), x + delta)


def test_rms_norm_without_delta_leaves_x(cuda_rig: Rig) -> None:
    x, weight = np.ones((1, 64), np.float32), np.full(64, 2, np.float32)
    there, to = cuda_rig.put(x), room(cuda_rig, k.RowKind.F32, 1, 64)
    k.rms_norm(cuda_rig.run, there, 0, cuda_rig.put(weight), to, n_rows=1, k=64, eps=0.0)
    close(to.kind, emitted(cuda_rig, to, 1, 64), np.full((1, 64), 2.0))
    assert np.array_equal(cuda_rig.get(there, x.shape, np.float32), x)


def test_post_norm_and_add_rows(cuda_rig: Rig) -> None:
    x, delta = np.random.default_rng(3).standard_normal((2, 3, 100)).astype(np.float32)
    weight = np.linspace(-1, 2, 100).astype(np.float32)
    there, d = cuda_rig.put(x), cuda_rig.put(delta)
    k.post_norm(cuda_rig.run, there, d, cuda_rig.put(weight), n_rows=3, k=100, eps=1e-6)
    expected = ref.post_norm(x, delta, weight, 1e-6)
    close(k.RowKind.F32, cuda_rig.get(there, x.shape, np.float32), expected)
    k.add_rows(cuda_rig.run, there, d, n=300)
    close(k.RowKind.F32, cuda_rig.get(there, x.shape, np.float32), expected + delta)


def test_take_rows(cuda_rig: Rig) -> None:
    x, index = np.random.default_rng(3).standard_normal((4, 1100)).astype(np.float32), np.array([3, -1, 3, 0])
    out = cuda_rig.empty(4 * 1100 * 4)
    k.take_rows(cuda_rig.run, cuda_rig.put(x), cuda_rig.put(index.astype(np.int32)), out, n=4, k=1100)
    expected = x[index]
    expected[1] = 0
    assert np.array_equal(cuda_rig.get(out, x.shape, np.float32), expected)


@pytest.mark.parametrize("kind", [k.RowKind.Q8, k.RowKind.F16])
def test_convert_rows_keeps_any_magnitude(cuda_rig: Rig, kind: k.RowKind) -> None:
    x = np.random.default_rng(1).standard_normal((5, 160)).astype(np.float32)
    x *= np.array([1e-12, 1, 3e5, 1e30, 0], np.float32)[:, None]
    to = room(cuda_rig, kind, 5, 160)
    k.convert_rows(cuda_rig.run, cuda_rig.put(x), to, n_rows=5, k=160)
    close(kind, emitted(cuda_rig, to, 5, 160), x.astype(np.float64))
    if kind is k.RowKind.Q8:
        q, meta = ref.quantize_rows(x)
        assert np.abs(cuda_rig.get(to.out, q.shape, np.int8).astype(int) - q).max() <= 1
        found = cuda_rig.get(to.extra, meta.shape, ref.META)
        sums = cuda_rig.get(to.out, (5, 5, 2, 16), np.int8).sum(-1, dtype=np.int16)
        assert np.array_equal(found["sum"], sums)


@pytest.mark.parametrize("activation", list(k.Activation))
def test_glu(cuda_rig: Rig, activation: k.Activation) -> None:
    both = np.random.default_rng(2).standard_normal((3, 2, 96)).astype(np.float32) * 6
    there, to = cuda_rig.put(both), room(cuda_rig, k.RowKind.F32, 3, 96)
    k.glu(cuda_rig.run, there, there + 4 * 96, to, n_rows=3, k=96, stride=192, activation=activation)
    expected = ref.glu(both[:, 0], both[:, 1], activation.name.lower())
    close(to.kind, emitted(cuda_rig, to, 3, 96), expected)


@pytest.mark.parametrize("kind", [k.RowKind.Q8, k.RowKind.F16])
def test_glu_emits_what_the_next_product_reads(cuda_rig: Rig, kind: k.RowKind) -> None:
    gate, up = np.random.default_rng(4).standard_normal((2, 2, 1056)).astype(np.float32)
    to = room(cuda_rig, kind, 2, 1056)
    k.glu(
        cuda_rig.run, cuda_rig.put(gate), cuda_rig.put(up), to, n_rows=2, k=1056, stride=1056,
        activation=k.Activation.SILU,
    )  # fmt: skip
    close(kind, emitted(cuda_rig, to, 2, 1056), ref.glu(gate, up, "silu"))


ROPES = {
    "norm": RopeSpec(n_dims=32, style="norm", base=10000.0),
    "neox-partial": RopeSpec(n_dims=48, style="neox", base=1e6, scale=0.25),
    "yarn": RopeSpec(n_dims=64, style="neox", base=150000.0, yarn_factor=32.0, n_ctx_orig=4096, attn_factor=1.3466),
}


@pytest.mark.parametrize(
    ("name", "heads", "norms"),
    [
        ("norm", k.HeadShape(3, 1, 32, False, False), False),
        ("neox-partial", k.HeadShape(2, 2, 64, True, False), True),
        ("yarn", k.HeadShape(4, 1, 64, False, True), False),
        ("neox-partial", k.HeadShape(6, 2, 96, True, True), True),
        ("norm", k.HeadShape(2, 1, 32, True, True), False),
    ],
)
def test_rope_store(cuda_rig: Rig, name: str, heads: k.HeadShape, norms: bool) -> None:
    rope, rng, d = ROPES[name], np.random.default_rng(7), heads.head_dim
    n_q, n_kv = heads.n_head, heads.n_head_kv
    positions = np.array([0, 1, 100_003, 77], np.int32)
    cells = np.array([5, 0, 9, -1], np.int32)
    qkv = rng.standard_normal((4, n_q + 2 * n_kv, d)).astype(np.float32)
    weights = rng.standard_normal((2, d)).astype(np.float32)
    factors = (1 + rng.random(rope.n_dims // 2)).astype(np.float32) if name == "norm" else None
    angles = rope_frequencies(rope, factors)
    k_rows, v_rows = cuda_rig.empty(10 * heads.k_row_bytes), cuda_rig.empty(10 * heads.v_row_bytes)
    there = cuda_rig.put(qkv)
    w = [cuda_rig.put(x) for x in weights] if norms else [0, 0]
    k.rope_store(
        cuda_rig.run, there, *w, cuda_rig.put(positions), cuda_rig.put(cells), cuda_rig.put(k.rope_turns(angles)),
        k_rows, v_rows, n_rows=4, stride=qkv[0].size, heads=heads, n_dims=rope.n_dims,
        neox=rope.style == "neox", eps=1e-6, magnitude=rope.attn_factor,
    )  # fmt: skip

    q_in, k_in = qkv[:, :n_q], qkv[:, n_q : n_q + n_kv]
    if norms:
        q_in, k_in = ref.rms(q_in, 1e-6) * weights[0], ref.rms(k_in, 1e-6) * weights[1]
    q, key = (
        ref.rope(x, positions, angles, neox=rope.style == "neox", magnitude=rope.attn_factor) for x in (q_in, k_in)
    )
    if mixes_keys("q8_0" if heads.k_q8 else "f16", d):
        q, key = hadamard_blocks(q), hadamard_blocks(key)
    found = cuda_rig.get(there, qkv.shape, np.float32)
    assert np.abs(found[:3, :n_q] - q[:3]).max() < 3e-6 * np.abs(q).max()
    assert np.array_equal(found[3], qkv[3])  # padding
    value = qkv[:, n_q + n_kv :]
    for rows, row_bytes, q8, expected in (
        (k_rows, heads.k_row_bytes, heads.k_q8, key),
        (v_rows, heads.v_row_bytes, heads.v_q8, value),
    ):
        check_rows(cuda_rig.get(rows, (10, row_bytes), np.uint8)[cells[:3]], expected[:3].reshape(3, -1), q8)


def check_rows(rows: np.ndarray, expected: np.ndarray, q8: bool) -> None:
    """Stored rows against their values: half a step of q8_0, 2^-11 of f16."""
    width = expected.shape[1]
    if not q8:
        found = rows[:, : 2 * width].copy().view(np.float16)
        assert (np.abs(found - expected) <= np.abs(expected) * 2.0**-11 + 5e-6).all()
        return
    step = np.repeat(np.abs(expected.reshape(len(rows), -1, 32)).max(-1) / 127, 32, -1)
    # the scale is kept as f16: 127 steps of it may be off by 127 * 2^-11
    assert (np.abs(ref.q8_row_values(rows, width) - expected) <= step * 0.57 + 5e-6).all()


def test_rope_turns_keep_the_angle_at_any_position() -> None:
    """To a millionth of a turn at position 2^20."""
    angles = rope_frequencies(ROPES["norm"])
    turns = k.rope_turns(angles).astype(np.float64).sum(-1)
    assert np.abs(turns * 2**20 - angles / (2 * np.pi) * 2**20).max() < 2.0**-20
