"""The small operations against NumPy, at every level this processor has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cpu_streams import golden_model

from llamatrio.backends.cpu import ops
from llamatrio.backends.cpu.compile import compile_kernel, python_function
from llamatrio.backends.cpu.levels import Level
from llamatrio.backends.cpu.reference import activate, hadamard_blocks, rms_norm, rotate, soft_cap
from llamatrio.backends.cpu.rope_table import RopeTable
from llamatrio.model.arch import spec_from_gguf
from llamatrio.model.gguf import open_gguf
from llamatrio.model.rope import rope_frequencies
from tests import emuamx

LEVELS = pytest.mark.parametrize("level", emuamx.levels(), ids=lambda level: level.name)
EPS = 1e-5


def run(emit: Any, level: Level, *arguments: Any) -> None:
    """Calls the kernel; arrays are passed as addresses, floats as their bits."""
    values = [
        a.ctypes.data if isinstance(a, np.ndarray) else ops.f32_bits(a) if isinstance(a, float) else a
        for a in arguments
    ]
    python_function(compile_kernel(emit.__name__, emit, level), len(values))(*values)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@LEVELS
@pytest.mark.parametrize("n", [16, 48, 576])
def test_norms(level: Level, n: int) -> None:
    x, y, weight = normal(3, n)
    out = np.empty_like(x)
    run(ops.rms_norm, level, x, weight, out, n, EPS)
    np.testing.assert_allclose(out, rms_norm(x.astype(np.float64), weight, EPS), rtol=2e-6, atol=1e-6)
    added = x.copy()
    run(ops.rms_norm_add, level, added, y, weight, n, EPS)
    np.testing.assert_allclose(added, x + rms_norm(y.astype(np.float64), weight, EPS), rtol=2e-6, atol=1e-6)


@LEVELS
def test_add_scale_and_copy(level: Level) -> None:
    x, y = normal(2, 64)
    total = x.copy()
    run(ops.add, level, total, y, 64)
    np.testing.assert_array_equal(total, x + y)
    run(ops.scale, level, total, 64, 0.125)
    np.testing.assert_array_equal(total, (x + y) * np.float32(0.125))
    run(ops.copy, level, x, total, 64)
    np.testing.assert_array_equal(total, x)


@LEVELS
@pytest.mark.parametrize(("emit", "name"), [(ops.silu_mul, "silu"), (ops.gelu_mul, "gelu")])
def test_gates(level: Level, emit: Any, name: str) -> None:
    gate, up = normal(2, 128) * 4
    gate[:4] = [-100, 100, 0, -30]
    out = up.copy()
    run(emit, level, gate, out, out, 128)
    np.testing.assert_allclose(out, activate(gate.astype(np.float64), name) * up, rtol=3e-6, atol=1e-6)


@LEVELS
def test_soft_cap(level: Level) -> None:
    x = np.linspace(-400, 400, 64, dtype=np.float32)
    out = x.copy()
    run(ops.soft_cap, level, out, 64, 30.0)
    np.testing.assert_allclose(out, soft_cap(x.astype(np.float64), 30.0), rtol=1e-6, atol=4e-6)


@LEVELS
@pytest.mark.parametrize(("emit", "style"), [(ops.rope_norm, "norm"), (ops.rope_neox, "neox")])
@pytest.mark.parametrize("n_dims", [20, 32, 64, 80])
def test_rope(level: Level, emit: Any, style: Any, n_dims: int) -> None:
    with open_gguf(golden_model("tiny-llama-f16")) as file:
        spec = spec_from_gguf(file)
    rope = replace(spec.rope, n_dims=n_dims, style=style, attn_factor=1.5)
    spec = replace(spec, rope=rope, head_dim=80)
    table = RopeTable(rope, None, np.zeros((2000, n_dims), np.float32), windowed=False)
    table.reach(1500)
    for position in (0, 1, 1500):
        x = normal(80, seed=position)
        out = x.copy()
        run(emit, level, out, table.address + 4 * n_dims * position, n_dims)
        angles = position * rope_frequencies(rope)[None]
        expected = rotate(x.astype(np.float64)[None, None], angles, spec)[0, 0]
        np.testing.assert_allclose(out, expected, atol=2e-6)


@LEVELS
@pytest.mark.parametrize("n", [32, 96])
def test_the_transform_of_blocks_is_its_own_inverse(level: Level, n: int) -> None:
    x = normal(n)
    out = x.copy()
    run(ops.hadamard_blocks, level, out, n)
    np.testing.assert_allclose(out, hadamard_blocks(x.astype(np.float64)), atol=2e-6)
    run(ops.hadamard_blocks, level, out, n)
    np.testing.assert_allclose(out, x, atol=2e-6)


@LEVELS
def test_half_float_rows_round_to_nearest_even(level: Level) -> None:
    x = normal(64)
    x[:4] = [1 + 2**-11, 1 + 3 * 2**-11, 1e-7, 6e4]
    out = np.zeros(64, np.float16)
    run(ops.store_f16, level, x, out, 64)
    np.testing.assert_array_equal(out, x.astype(np.float16))


@LEVELS
def test_scan_of_logits(level: Level) -> None:
    x = normal(256) * 5
    x[200:] = ops.MASKED
    maxima, segment = np.zeros(4, np.float32), np.zeros(2, np.float32)
    run(ops.scan_logits, level, x, 256, maxima, segment)
    np.testing.assert_array_equal(maxima, x.reshape(4, 64).max(axis=1))
    assert segment[0] == x.max()
    assert segment[1] == pytest.approx(np.exp(x[:200].astype(np.float64) - x.max()).sum(), rel=1e-5)
