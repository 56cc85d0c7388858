"""Weight matrices on the device: their types, their planes (cuda_src/planes.cuh), `planar_rows` and `embed_rows`."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from llamatrio.backends.cuda.kernels.launcher import (
    DevicePointer,
    Launcher,
    f32,
    i32,
    i64,
    require_multiple,
    whole_warps,
)

BLOCK = 32
"""Weights in a block of the planes; `k` is a multiple of it."""


class WeightType(IntEnum):
    """GGUF's tensor types that the kernels multiply with; the values are the kernels' -DTYPE."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ4_NL = 20
    IQ4_XS = 23
    BF16 = 30
    MXFP4 = 39

    @property
    def is_float(self) -> bool:
        """Kept as in the file, and multiplied by matmul_float rather than matmul_rows."""
        return self in (WeightType.F32, WeightType.F16, WeightType.BF16)


class Format(NamedTuple):
    """Bytes a block of 32 takes in each plane; `top_blocks` blocks share an entry of the top plane."""

    low: int
    high: int
    sub: int
    top: int
    top_blocks: int
    gguf_bytes: int
    """Bytes of the file's block of `32 * top_blocks` weights."""


FORMATS = {
    WeightType.F32: Format(128, 0, 0, 0, 1, 128),
    WeightType.F16: Format(64, 0, 0, 0, 1, 64),
    WeightType.BF16: Format(64, 0, 0, 0, 1, 64),
    WeightType.Q4_0: Format(16, 0, 0, 2, 1, 18),
    WeightType.Q4_1: Format(16, 0, 0, 4, 1, 20),
    WeightType.Q5_0: Format(16, 4, 0, 2, 1, 22),
    WeightType.Q5_1: Format(16, 4, 0, 4, 1, 24),
    WeightType.Q8_0: Format(32, 0, 0, 2, 1, 34),
    WeightType.Q2_K: Format(8, 0, 2, 4, 8, 84),
    WeightType.Q3_K: Format(8, 4, 2, 2, 8, 110),
    WeightType.Q4_K: Format(16, 0, 2, 4, 8, 144),
    WeightType.Q5_K: Format(16, 4, 2, 4, 8, 176),
    WeightType.Q6_K: Format(16, 8, 2, 2, 8, 210),
    WeightType.IQ4_NL: Format(16, 0, 0, 2, 1, 18),
    WeightType.IQ4_XS: Format(16, 0, 1, 2, 8, 136),
    WeightType.MXFP4: Format(16, 0, 0, 1, 1, 17),
}


class Matrix(NamedTuple):
    """A weight matrix on the device: `n_out` rows of `k` weights each, of `n_expert` experts one after the other."""

    type: WeightType
    planes: DevicePointer
    n_out: int
    k: int
    n_expert: int = 1


def planes_bytes(type: WeightType, n_rows: int, k: int) -> int:
    """Bytes of a matrix in planes. ValueError when k does not fit the type's blocks."""
    form = FORMATS[type]
    require_multiple("k", k, BLOCK * form.top_blocks)
    n = n_rows * k // BLOCK
    planes = (n * form.low, n * form.high, n * form.sub, n // form.top_blocks * form.top)
    return sum(-(-size // 16) * 16 for size in planes)


def planar_rows(
    run: Launcher, gguf: DevicePointer, planes: DevicePointer, *, type: WeightType, n_rows: int, k: int
) -> None:
    """A quantized tensor's bytes, as in the file, into planes of `planes_bytes` bytes. Once, at load."""
    if type.is_float:
        raise ValueError(f"expected a quantized type, not {type.name}: it is used as it is")
    planes_bytes(type, n_rows, k)
    n = n_rows * k // BLOCK
    run("planar_rows", (-(-n // 8),), 256, gguf, planes, i64(n), TYPE=type)


def embed_rows(
    run: Launcher, matrix: Matrix, tokens: DevicePointer, out: DevicePointer, *, n_rows: int, scale: float
) -> None:
    """Rows `tokens[r]` (i32; negative is padding, a row of zeros) of the matrix times `scale`, as f32 [n_rows, k]."""
    run(
        "embed_rows",
        (n_rows,),
        whole_warps(matrix.k // BLOCK, 128),
        matrix.planes,
        tokens,
        out,
        i32(matrix.n_out),
        i32(matrix.k),
        f32(scale),
        TYPE=matrix.type,
    )
