"""Random packed matrices and activations for the tests of the CPU kernels."""

from __future__ import annotations

import numpy as np

from llamatrio.backends.cpu.activations import PanelForm, bf16_bytes, panel_rows_kernel, q8_bytes, quantize_rows_kernel
from llamatrio.backends.cpu.compile import python_function
from llamatrio.backends.cpu.levels import Level
from llamatrio.backends.cpu.pack import pack, packed_bytes
from llamatrio.model.ggml_type import GGMLType, block_shape
from llamatrio.model.quants import dequantize

SCALES_AT = {
    GGMLType.Q4_0: (0,),
    GGMLType.Q4_1: (0, 2),
    GGMLType.Q5_0: (0,),
    GGMLType.Q5_1: (0, 2),
    GGMLType.Q8_0: (0,),
    GGMLType.IQ4_NL: (0,),
    GGMLType.MXFP4: (),
    GGMLType.Q2_K: (80, 82),
    GGMLType.Q3_K: (108,),
    GGMLType.Q4_K: (0, 2),
    GGMLType.Q5_K: (0, 2),
    GGMLType.Q6_K: (208,),
    GGMLType.IQ4_XS: (0,),
}
"""Bytes of a block at which its f16 scales are."""


def aligned(n_bytes: int) -> np.ndarray:
    """uint8 [n_bytes] at a 64-byte border, full of a byte that is no sensible number in any format."""
    whole = np.full(n_bytes + 64, 0xCD, np.uint8)
    start = -whole.ctypes.data % 64
    return whole[start : start + n_bytes]


def random_rows(type: GGMLType, n: int, k: int, seed: int = 0) -> np.ndarray:
    """uint8 [n, row_bytes]: rows of `type` with every bit random but those of the scales, which are moderate."""
    rng = np.random.default_rng(seed)
    if type not in SCALES_AT:
        weights = rng.standard_normal((n, k)).astype(np.float32)
        if type == GGMLType.BF16:
            return (weights.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return weights.astype(np.float32 if type == GGMLType.F32 else np.float16).view(np.uint8)
    shape = block_shape(type)
    blocks = rng.integers(0, 256, (n, k // shape.n_weights, shape.n_bytes), np.uint8)
    for at in SCALES_AT[type]:
        scales = rng.standard_normal((*blocks.shape[:2], 1)) * 0.01
        blocks[..., at : at + 2] = scales.astype(np.float16).view(np.uint8)
    if type == GGMLType.MXFP4:
        blocks[..., 0] = rng.integers(118, 130, blocks.shape[:2])
    return blocks.reshape(n, -1)


class Matrix:
    """A random matrix of n x k: its weights as numbers and as packed bytes."""

    def __init__(self, type: GGMLType, n: int, k: int) -> None:
        raw = random_rows(type, n, k)
        self.n, self.k = n, k
        self.n_groups = -(-n // 16)
        self.weights = dequantize(raw, type)
        self.packed = aligned(packed_bytes(type, n, k))
        pack(type, raw, self.packed)


def random_activations(m: int, k: int, seed: int = 1) -> np.ndarray:
    """float32 [m, k], the rows of unlike size."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((m, k)) * rng.uniform(0.1, 4, (m, 1))).astype(np.float32)


def to_q8(x: np.ndarray, level: Level) -> np.ndarray:
    """uint8 [m, k / 32, 64]: the q8 form of x."""
    m, k = x.shape
    out = aligned(q8_bytes(m, k))
    python_function(quantize_rows_kernel(level), 4)(x.ctypes.data, out.ctypes.data, m, k)
    return out.reshape(m, k // 32, 64)


def from_q8(records: np.ndarray) -> np.ndarray:
    """float64 [m, k]: what q8 records stand for."""
    codes = records[..., :32].view(np.int8).astype(np.float64)
    scales = np.ascontiguousarray(records[..., 32:36]).view(np.float32)
    return (codes * scales).reshape(len(records), -1)


def to_tiles(x: np.ndarray, form: PanelForm, level: Level) -> np.ndarray:
    """x in a form of the panel kernels: uint8."""
    m, k = x.shape
    out = aligned(bf16_bytes(m, k))
    python_function(panel_rows_kernel(form, level), 4)(x.ctypes.data, out.ctypes.data, m, k)
    return out


def round_to_bf16(x: np.ndarray) -> np.ndarray:
    """float32, each rounded to the nearest bf16, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32)
