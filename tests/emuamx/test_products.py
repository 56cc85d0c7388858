"""The products against NumPy, and by hand where numbers are at an edge.

Where the processor has AMX, these tests hold it to what the emulator is held to.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests import emuamx
from tests.backends.cpu_matrices import round_to_bf16

from .assembly import Array, config, run

pytestmark = emuamx.needs_amx()

SIZES = [(16, 16, 16), (5, 3, 7), (1, 16, 2), (16, 1, 1)]
"""m, n and k of a product, in units of 4 bytes."""


def product(name: str, to: Array, left: Array, right: Array) -> Array:
    """to [m, n] of 4-byte numbers, plus what the instruction says of left [m, 4 k] and right [k, 4 n] bytes."""
    m, n = to.shape
    k = len(right)
    out = np.ascontiguousarray(to).copy()
    text = f"""
        ldtilecfg (%rdi)
        tileloadd (%rsi,%r9), %tmm3
        tileloadd (%rdx,%r9), %tmm5
        tileloadd (%rcx,%r9), %tmm6
        {name} %tmm6, %tmm5, %tmm3
        tilestored %tmm3, (%rsi,%r9)
        tilerelease"""
    unused = (0, 0)
    shapes = config(unused, unused, unused, (m, 4 * n), unused, (m, 4 * k), (k, 4 * n))
    padded = [np.zeros((16, 64), np.uint8) for _ in range(3)]
    for room, content in zip(padded, (out, left, right), strict=True):
        room[: len(content), : content.view(np.uint8).shape[1]] = content.view(np.uint8)
    before = padded[0].copy()
    run(text, shapes, *padded, 0, 64)
    np.testing.assert_array_equal(padded[0][m:], before[m:])
    np.testing.assert_array_equal(padded[0][:, 4 * n :], before[:, 4 * n :])
    return padded[0][:m, : 4 * n].copy().view(out.dtype)


@pytest.mark.parametrize(("m", "n", "k"), SIZES)
@pytest.mark.parametrize(
    ("name", "left", "right"),
    [("tdpbssd", "i1", "i1"), ("tdpbsud", "i1", "u1"), ("tdpbusd", "u1", "i1"), ("tdpbuud", "u1", "u1")],
)
def test_products_of_bytes(name: str, left: str, right: str, m: int, n: int, k: int) -> None:
    rng = np.random.default_rng(m)
    a, b = rng.integers(0, 256, (m, 4 * k), np.uint8), rng.integers(0, 256, (k, 4 * n), np.uint8)
    c = rng.integers(-(2**31), 2**31, (m, n), np.int64).astype(np.int32)
    x = a.view(left).astype(np.int64)
    y = b.view(right).astype(np.int64).reshape(k, n, 4).transpose(0, 2, 1).reshape(4 * k, n)
    np.testing.assert_array_equal(product(name, c, a, b), (c + x @ y).astype(np.int32))  # sums wrap


def to_bf16(x: Array) -> Array:
    """float32 to the bytes of its upper halves."""
    return (np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def pairs_of_rows(y: Array) -> Array:
    """[2 k, n] as [k, 2 n], as the right operand lies."""
    return y.reshape(-1, 2, y.shape[1]).transpose(0, 2, 1).reshape(len(y) // 2, -1)


@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_products_of_bf16(m: int, n: int, k: int) -> None:
    """Of whole numbers, whose sums are exact, and of others, whose sums are close."""
    rng = np.random.default_rng(n)
    x, y = (rng.integers(-64, 64, shape).astype(np.float32) for shape in ((m, 2 * k), (2 * k, n)))
    c = rng.integers(-99, 99, (m, n)).astype(np.float32)
    np.testing.assert_array_equal(product("tdpbf16ps", c, to_bf16(x), to_bf16(pairs_of_rows(y))), c + x @ y)
    x, y = (round_to_bf16(rng.standard_normal(shape).astype(np.float32)) for shape in ((m, 2 * k), (2 * k, n)))
    out = product("tdpbf16ps", c, to_bf16(x), to_bf16(pairs_of_rows(y)))
    np.testing.assert_allclose(out, c + x.astype(np.float64) @ y, rtol=3e-6, atol=1e-5)


def bf16_dot(c: float, x: list[float], y: list[float]) -> np.float32:
    """c + the dot product of two rows of bf16, by the instruction: column 0 of row 0."""
    assert len(x) == len(y)
    left, right = (np.array([row], np.float32) for row in (x, y))
    out = product("tdpbf16ps", np.array([[c]], np.float32), to_bf16(left), to_bf16(pairs_of_rows(right.T)))
    return np.float32(out[0, 0])


TINY = float(np.float32(2.0**-126))
"""The smallest normal number."""


@pytest.mark.parametrize(
    ("c", "x", "y", "expected"),
    [
        (0, [TINY / 2, 0], [4, 0], 0),  # a subnormal operand is 0 ...
        (0, [0, 4], [0, -TINY / 2], 0),
        (TINY / 2, [TINY, 0], [1, 0], TINY),  # ... as it is in the sum ...
        (0, [TINY, 0], [0.5, 0], 0),  # ... and a subnormal result
        (0, [TINY, TINY], [0.75, 0.75], 0),  # each of which is one before they meet
        (TINY, [TINY, 0], [-0.75, 0], TINY),
        (0, [TINY, 0], [1, 0], TINY),
        (-1.5 * TINY, [TINY, 0], [1, 0], 0),
        (1, [2.0**-24, 0], [1, 0], 1),  # a tie goes to even, down ...
        (1 + 2.0**-23, [2.0**-24, 0], [1, 0], 1 + 2.0**-22),  # ... and up
        (1, [2.0**-24, 2.0**-24], [1, 1], 1 + 2.0**-23),  # the pair is summed before it meets c
        # Even and odd places are summed apart: 2^30 loses the 1 that joins it, and would lose no other.
        (0, [2.0**30, 0, 1, 0, -(2.0**30), 0], [1] * 6, 0),
        (0, [2.0**30, 1, 0, 0, -(2.0**30), 0], [1] * 6, 1),
        # Products are not rounded before they are added: one is subnormal, one is too large.
        (0, [TINY, 0, TINY, 0], [1, 1, 0.5, 1], 1.5 * TINY),
        (0, [-(2.0**127), 0, 2.0**127, 0], [1, 1, 2, 1], 2.0**127),
    ],
)
def test_bf16_sums_at_the_edges(c: float, x: list[float], y: list[float], expected: float) -> None:
    assert bf16_dot(c, x, y) == np.float32(expected)


def test_bf16_sums_hold_infinities_and_no_numbers() -> None:
    assert bf16_dot(1, [np.inf, 0], [1, 0]) == np.inf
    assert np.isnan(bf16_dot(1, [np.inf, 0], [0, 0]))
    assert np.isnan(bf16_dot(1, [np.inf, -np.inf], [1, 1]))
    assert bf16_dot(0, [2.0**127, 0], [2, 0]) == np.inf
    assert np.isnan(bf16_dot(0, [2.0**127, 2.0**127], [2, -2]))


def test_the_callers_rounding_is_neither_used_nor_changed() -> None:
    """MXCSR of rounding upwards, and what it is behind the product."""
    mxcsr = np.array([0x5F80, 0], np.uint32)
    text = """
        stmxcsr 4(%r8)
        ldmxcsr (%r8)
        ldtilecfg (%rdi)
        tileloadd (%rsi,%r9), %tmm0
        tileloadd (%rdx,%r9), %tmm1
        tileloadd (%rdx,%r9), %tmm2
        tdpbf16ps %tmm2, %tmm1, %tmm0
        tilestored %tmm0, (%rsi,%r9)
        tilerelease
        stmxcsr (%r8)
        ldmxcsr 4(%r8)"""
    sums, ones = np.ones((1, 16), np.float32), np.zeros((1, 32), np.float32)
    ones[0, 0] = 2.0**-12  # squared, half of the last bit of 1
    run(text, config((1, 4), (1, 4), (1, 4)), sums, to_bf16(ones), 0, mxcsr, 64)
    assert sums[0, 0] == 1
    assert mxcsr[0] == 0x5F80
