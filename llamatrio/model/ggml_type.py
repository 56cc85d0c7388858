"""Tensor types of GGUF files: their ids and the size of their blocks (as in ggml's type traits)."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class GGMLType(IntEnum):
    """The id that a GGUF file stores for each tensor. Gaps are types that ggml has withdrawn."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39


class BlockShape(NamedTuple):
    """A block holds `n_weights` consecutive weights of one row in `n_bytes` bytes."""

    n_weights: int
    n_bytes: int


_SHAPES = {
    GGMLType.F32: BlockShape(1, 4),
    GGMLType.F16: BlockShape(1, 2),
    GGMLType.Q4_0: BlockShape(32, 18),
    GGMLType.Q4_1: BlockShape(32, 20),
    GGMLType.Q5_0: BlockShape(32, 22),
    GGMLType.Q5_1: BlockShape(32, 24),
    GGMLType.Q8_0: BlockShape(32, 34),
    GGMLType.Q8_1: BlockShape(32, 36),
    GGMLType.Q2_K: BlockShape(256, 84),
    GGMLType.Q3_K: BlockShape(256, 110),
    GGMLType.Q4_K: BlockShape(256, 144),
    GGMLType.Q5_K: BlockShape(256, 176),
    GGMLType.Q6_K: BlockShape(256, 210),
    GGMLType.Q8_K: BlockShape(256, 292),
    GGMLType.IQ2_XXS: BlockShape(256, 66),
    GGMLType.IQ2_XS: BlockShape(256, 74),
    GGMLType.IQ3_XXS: BlockShape(256, 98),
    GGMLType.IQ1_S: BlockShape(256, 50),
    GGMLType.IQ4_NL: BlockShape(32, 18),
    GGMLType.IQ3_S: BlockShape(256, 110),
    GGMLType.IQ2_S: BlockShape(256, 82),
    GGMLType.IQ4_XS: BlockShape(256, 136),
    GGMLType.I8: BlockShape(1, 1),
    GGMLType.I16: BlockShape(1, 2),
    GGMLType.I32: BlockShape(1, 4),
    GGMLType.I64: BlockShape(1, 8),
    GGMLType.F64: BlockShape(1, 8),
    GGMLType.IQ1_M: BlockShape(256, 56),
    GGMLType.BF16: BlockShape(1, 2),
    GGMLType.TQ1_0: BlockShape(256, 54),
    GGMLType.TQ2_0: BlockShape(256, 66),
    GGMLType.MXFP4: BlockShape(32, 17),
}


def block_shape(type: GGMLType) -> BlockShape:
    """Weights and bytes of one block of `type`."""
    return _SHAPES[type]
