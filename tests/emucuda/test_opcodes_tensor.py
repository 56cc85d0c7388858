"""mma in every shape that kernels for sm_80 use, ldmatrix and movmatrix, by the fragment layouts of the PTX manual.

Fragments are built here from those layouts element by element, apart from how the runtime does it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest

from .control import Control


def run(source: str, *arrays: np.ndarray) -> list[np.ndarray]:
    from .helpers import Gpu

    return Gpu().run(source, *arrays)


def bf16(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def widen_bf16(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32)


def positions(elements: int, m: int, k: int) -> tuple[list[list[tuple[int, int]]], list[list[tuple[int, int]]]]:
    """For each lane, the (row, column) of its A elements and the (row, column) of its B elements, in register order."""
    a_all, b_all = [], []
    for lane in range(32):
        group, thread = divmod(lane, 4)
        a, b = [], []
        for start in range(0, k, 4 * elements):
            for row in (group, group + 8)[: m // 8]:
                a += [(row, start + thread * elements + i) for i in range(elements)]
            b += [(start + thread * elements + i, group) for i in range(elements)]
        a_all.append(a)
        b_all.append(b)
    return a_all, b_all


def random_f16(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return rng.normal(0, 1, shape).astype(np.float16)


def random_ints(dtype: type) -> Callable[[np.random.Generator, tuple[int, int]], np.ndarray]:
    return lambda rng, shape: rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max + 1, shape).astype(dtype)


def random_tf32(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return (rng.normal(0, 1, shape).astype(np.float32).view(np.uint32) & 0xFFFFE000).view(np.float32)


DRAW = {
    "f16": random_f16,
    "bf16": lambda rng, shape: bf16(rng.normal(0, 1, shape)),
    "tf32": random_tf32,
    "s8": random_ints(np.int8),
    "u8": random_ints(np.uint8),
}
SHAPES = [
    ("m16n8k16", "f32", "f16", "f16"), ("m16n8k16", "f16", "f16", "f16"), ("m16n8k16", "f32", "bf16", "bf16"),
    ("m16n8k8", "f32", "f16", "f16"), ("m16n8k8", "f32", "bf16", "bf16"), ("m16n8k8", "f32", "tf32", "tf32"),
    ("m16n8k4", "f32", "tf32", "tf32"), ("m16n8k32", "s32", "s8", "s8"), ("m16n8k32", "s32", "u8", "s8"),
    ("m16n8k16", "s32", "s8", "s8"), ("m16n8k16", "s32", "s8", "u8"), ("m8n8k16", "s32", "s8", "s8"),
]  # fmt: skip


def mma_kernel(shape: str, acc: str, a: str, b: str, n_a: int, n_b: int, n_c: int) -> str:
    names = lambda start, n: "{" + ", ".join(f"%{start + i}" for i in range(n)) + "}"  # noqa: E731
    operands = ", ".join([names(0, n_c), names(n_c, n_a), names(n_c + n_a, n_b), names(0, n_c)])
    text = f"mma.sync.aligned.{shape}.row.col.{acc}.{a}.{b}.{acc} {operands};"
    outs = ", ".join(f'"+r"(c[{i}])' for i in range(n_c))
    ins = ", ".join(
        [*(f'"r"(a[t * {n_a} + {i}])' for i in range(n_a)), *(f'"r"(b[t * {n_b} + {i}])' for i in range(n_b))]
    )
    return f"""extern "C" __global__ void k(const unsigned* a, const unsigned* b, unsigned* d) {{
        int t = threadIdx.x; unsigned c[{n_c}]; for (int i = 0; i < {n_c}; ++i) c[i] = d[t * {n_c} + i];
        asm volatile("{text}" : {outs} : {ins}); for (int i = 0; i < {n_c}; ++i) d[t * {n_c} + i] = c[i]; }}"""


@pytest.mark.parametrize(("shape", "acc", "a_type", "b_type"), SHAPES, ids=[".".join(s) for s in SHAPES])
def test_mma(emucuda: Control, shape: str, acc: str, a_type: str, b_type: str) -> None:
    m, k = int(shape[1:].split("n")[0]), int(shape.split("k")[1])
    rng = np.random.default_rng(k)
    a, b = DRAW[a_type](rng, (m, k)), DRAW[b_type](rng, (k, 8))
    c_type = {"f32": np.float32, "f16": np.float16, "s32": np.int32}[acc]
    c = rng.integers(-50, 50, (m, 8)).astype(c_type)
    per_register = 4 // a.itemsize
    a_at, b_at = positions(per_register, m, k)
    c_at = [[(lane // 4 + 8 * (i // 2), lane % 4 * 2 + i % 2) for i in range(m // 4)] for lane in range(32)]
    fragments = [np.array([[x[p] for p in lane] for lane in at]) for x, at in ((a, a_at), (b, b_at), (c, c_at))]
    words = [f.view(np.uint32).reshape(32, -1) for f in fragments]
    source = mma_kernel(shape, acc, a_type, b_type, *(w.shape[1] for w in words))
    got = run(source, *words)[2].view(c_type).reshape(32, -1)
    wide = (
        widen_bf16
        if a_type == "bf16"
        else functools.partial(np.asarray, dtype=np.int64 if acc == "s32" else np.float64)
    )
    expected = wide(a) @ wide(b) + c
    d = np.zeros_like(expected)
    for lane, places in enumerate(c_at):
        for i, place in enumerate(places):
            d[place] = got[lane, i]
    if acc == "s32":
        assert np.array_equal(d, expected)
    else:
        assert np.allclose(d, expected, atol=0.05 if acc == "f16" else 1e-4)


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix(emucuda_checked: Control, n: int, transposed: bool) -> None:
    trans = ".trans" if transposed else ""
    outs = ", ".join(f"%{i}" for i in range(n))
    source = f"""extern "C" __global__ void k(const uint4* x, unsigned* y) {{
        __shared__ uint4 s[32]; int t = threadIdx.x; s[t] = x[t]; __syncwarp(); unsigned r[{n}];
        unsigned at = (unsigned)__cvta_generic_to_shared(&s[t]);
        asm volatile("ldmatrix.sync.aligned.m8n8.x{n}{trans}.shared.b16 {{{outs}}}, [%{n}];"
                     : {", ".join(f'"=r"(r[{i}])' for i in range(n))} : "r"(at));
        for (int i = 0; i < {n}; ++i) y[t * {n} + i] = r[i]; }}"""
    x = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)
    y = run(source, x, np.zeros((32, n), np.uint32))[1].view(np.uint16).reshape(32, n, 2)
    for lane in range(32):
        for matrix in range(n):
            source_matrix = x[matrix].T if transposed else x[matrix]
            row, column = lane // 4, lane % 4 * 2
            assert y[lane, matrix].tolist() == source_matrix[row, column : column + 2].tolist()


def test_movmatrix(emucuda: Control) -> None:
    source = r"""extern "C" __global__ void k(const unsigned* x, unsigned* y) { unsigned r;
        asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x[threadIdx.x]));
        y[threadIdx.x] = r; }"""
    x = np.arange(64, dtype=np.uint16).reshape(8, 8)
    y = run(source, x, np.zeros(32, np.uint32))[1].view(np.uint16).reshape(8, 8)
    assert np.array_equal(y, x.T)
