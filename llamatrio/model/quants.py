"""Quantized weights to float32, and q8_0 back: the readable reference for the backends' kernels.

A row of weights is a sequence of blocks (`block_shape`). Each function below takes blocks as uint8
[n_blocks, n_bytes] and returns float32 [n_blocks, n_weights]. A comment gives the block's fields in order, where
`d` is a half float. The formats are ggml's (ggml-common.h, ggml-quants.c).

Two families: the old formats hold 32 weights with one scale each; the K formats hold 256, with 8 or 16 groups
whose scales are integers themselves.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from llamatrio.errors import UnsupportedModelError
from llamatrio.model.ggml_type import BlockShape, GGMLType, block_shape

__all__ = ["BlockShape", "GGMLType", "block_shape", "can_dequantize", "dequantize", "quantize_q8_0"]

UInt8Array = NDArray[np.uint8]
Float32Array = NDArray[np.float32]

# The 16 levels of the non-linear 4-bit formats.
_IQ4_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32)
# The 16 values of FP4 (E2M1): sign, then 0, 0.5, 1, 1.5, 2, 3, 4, 6.
_FP4_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)


def can_dequantize(type: GGMLType) -> bool:
    """Whether `dequantize` knows `type`."""
    return type in _DEQUANTIZERS


def dequantize(raw: UInt8Array, type: GGMLType) -> Float32Array:
    """Weights of the rows `raw`: uint8 [..., row_bytes] to float32 [..., n].

    Raises:
        UnsupportedModelError: `type` is not one of those we read.
        ValueError: row_bytes is not a whole number of blocks.
    """
    if type not in _DEQUANTIZERS:
        raise UnsupportedModelError(f"tensors of type {type.name} are not supported")
    shape = block_shape(type)
    row_bytes = raw.shape[-1]
    if row_bytes % shape.n_bytes:
        raise ValueError(f"expected rows of whole {type.name} blocks of {shape.n_bytes} bytes, not {row_bytes} bytes")
    blocks = np.ascontiguousarray(raw).reshape(-1, shape.n_bytes)
    weights = _DEQUANTIZERS[type](blocks)
    return weights.reshape(*raw.shape[:-1], row_bytes // shape.n_bytes * shape.n_weights)


def quantize_q8_0(weights: Float32Array) -> UInt8Array:
    """Rows of weights as q8_0 blocks: float32 [..., n] to uint8 [..., n / 32 * 34], n a multiple of 32.

    The scale is the largest magnitude over 127; values are rounded half away from zero, as ggml does.
    """
    if weights.shape[-1] % 32:
        raise ValueError(f"expected rows of a multiple of 32 weights, not {weights.shape[-1]}")
    blocks = np.asarray(weights, dtype=np.float32).reshape(-1, 32)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    # The inverse of a smaller scale would overflow; as a half float it is 0, so the codes do not matter.
    has_inverse = scale > 1 / np.finfo(np.float32).max
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=has_inverse)
    scaled = blocks * inverse
    rounded = np.trunc(scaled + np.copysign(np.float32(0.5), scaled)).astype(np.int8)
    packed = np.concatenate([scale.astype("<f2").view(np.uint8), rounded.view(np.uint8)], axis=1)
    return packed.reshape(*weights.shape[:-1], weights.shape[-1] // 32 * 34)


def _half(blocks: UInt8Array, at: int) -> Float32Array:
    """The half float at byte `at` of each block: [n_blocks, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: UInt8Array) -> UInt8Array:
    """4-bit fields [..., n] -> [..., 2 n]: all low halves, then all high halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _crumbs(packed: UInt8Array) -> UInt8Array:
    """2-bit fields [..., n] -> [..., 4 n]: the lowest two bits of all bytes first."""
    return np.concatenate([packed >> shift & 3 for shift in (0, 2, 4, 6)], axis=-1)


def _bits(packed: UInt8Array) -> UInt8Array:
    """Bits [..., n] -> [..., 8 n]: bit 0 of all bytes first."""
    return np.concatenate([packed >> shift & 1 for shift in range(8)], axis=-1)


def _f32(blocks: UInt8Array) -> Float32Array:
    return blocks.view("<f4").astype(np.float32)


def _f16(blocks: UInt8Array) -> Float32Array:
    return blocks.view("<f2").astype(np.float32)


def _bf16(blocks: UInt8Array) -> Float32Array:
    # The upper half of a float32.
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q4_0(blocks: UInt8Array) -> Float32Array:
    # d, nibbles[16]: d (q - 8)
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: UInt8Array) -> Float32Array:
    # d, m, nibbles[16]: d q + m
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]) + _half(blocks, 2)


def _fifth_bits(blocks: UInt8Array, at: int) -> UInt8Array:
    """32 bits at byte `at`, weight 0's in the lowest, moved to the place of bit 4: [n_blocks, 32]."""
    return np.unpackbits(blocks[:, at : at + 4], axis=-1, bitorder="little") << np.uint8(4)


def _q5_0(blocks: UInt8Array) -> Float32Array:
    # d, fifth bits[4], nibbles[16]: d (q - 16)
    quants = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return _half(blocks, 0) * (quants.astype(np.float32) - 16)


def _q5_1(blocks: UInt8Array) -> Float32Array:
    # d, m, fifth bits[4], nibbles[16]: d q + m
    quants = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return _half(blocks, 0) * quants.astype(np.float32) + _half(blocks, 2)


def _q8_0(blocks: UInt8Array) -> Float32Array:
    # d, int8[32]: d q
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _q2_k(blocks: UInt8Array) -> Float32Array:
    # (scale, min) nibbles[16], 2-bit quants[64], d, dmin: d scale q - dmin min, per group of 16
    scale = _half(blocks, 80) * (blocks[:, :16] & 15).astype(np.float32)
    low = _half(blocks, 82) * (blocks[:, :16] >> 4).astype(np.float32)
    quants = _crumbs(blocks[:, 16:80].reshape(-1, 2, 32)).reshape(-1, 16, 16).astype(np.float32)
    return (scale[:, :, None] * quants - low[:, :, None]).reshape(-1, 256)


def _q3_k(blocks: UInt8Array) -> Float32Array:
    # third bits[32], 2-bit quants[64], 6-bit scales[12], d: d (scale - 32) (q - 4), per group of 16
    packed = blocks[:, 96:108]
    scale = _nibbles(packed[:, :8]) | _crumbs(packed[:, 8:]) << 4
    quants = _crumbs(blocks[:, 32:96].reshape(-1, 2, 32)).reshape(-1, 256) | _bits(blocks[:, :32]) << 2
    step = _half(blocks, 108) * (scale.astype(np.float32) - 32)
    return (step[:, :, None] * (quants.reshape(-1, 16, 16).astype(np.float32) - 4)).reshape(-1, 256)


def _k_scales(packed: UInt8Array) -> tuple[UInt8Array, UInt8Array]:
    """Scales and minima of Q4_K and Q5_K, six bits each in 12 bytes: two of [n_blocks, 8].

    Groups 0 to 3 have theirs in the low six bits of bytes 0-3 and 4-7; groups 4 to 7 have four bits in bytes
    8-11 (the scale's in the low half) and the upper two on top of the bytes before.
    """
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=1)
    low = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1)
    return scale, low


def _scale_k(blocks: UInt8Array, quants: UInt8Array) -> Float32Array:
    """d scale q - dmin min, per group of 32, for blocks that open with d, dmin and their packed scales."""
    scale, low = _k_scales(blocks[:, 4:16])
    step, offset = _half(blocks, 0) * scale, _half(blocks, 2) * low
    return (step[:, :, None] * quants.reshape(-1, 8, 32) - offset[:, :, None]).reshape(-1, 256)


def _q4_k(blocks: UInt8Array) -> Float32Array:
    # d, dmin, scales[12], nibbles[128]
    return _scale_k(blocks, _nibbles(blocks[:, 16:].reshape(-1, 4, 32)))


def _q5_k(blocks: UInt8Array) -> Float32Array:
    # d, dmin, scales[12], fifth bits[32], nibbles[128]
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 256)
    return _scale_k(blocks, low | _bits(blocks[:, 16:48]) << np.uint8(4))


def _q6_k(blocks: UInt8Array) -> Float32Array:
    # low nibbles[128], upper 2 bits[64], int8 scales[16], d: d scale (q - 32), per group of 16
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 256)
    high = _crumbs(blocks[:, 128:192].reshape(-1, 2, 32)).reshape(-1, 256)
    step = _half(blocks, 208) * blocks[:, 192:208].view(np.int8)
    quants = (low | high << 4).reshape(-1, 16, 16).astype(np.float32) - 32
    return (step[:, :, None] * quants).reshape(-1, 256)


def _iq4_nl(blocks: UInt8Array) -> Float32Array:
    # d, nibbles[16]: d level[q]
    return _half(blocks, 0) * _IQ4_LEVELS[_nibbles(blocks[:, 2:])]


def _iq4_xs(blocks: UInt8Array) -> Float32Array:
    # d, upper 2 bits of scales (u16), low nibbles of scales[4], nibbles[128]: d (scale - 32) level[q], per 32
    low = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], axis=-1).reshape(-1, 8)
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    step = _half(blocks, 0) * ((low | high << 4).astype(np.float32) - 32)
    levels: Float32Array = _IQ4_LEVELS[_nibbles(blocks[:, 8:].reshape(-1, 8, 16))]
    return np.asarray(step[:, :, None] * levels).reshape(-1, 256)


def _mxfp4(blocks: UInt8Array) -> Float32Array:
    # exponent (E8M0: 2 ** (e - 127)), nibbles[16]: the scale times an FP4 value
    scale: Float32Array = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 127)
    return scale * _FP4_VALUES[_nibbles(blocks[:, 1:])]


_DEQUANTIZERS: dict[GGMLType, Callable[[UInt8Array], Float32Array]] = {
    GGMLType.F32: _f32,
    GGMLType.F16: _f16,
    GGMLType.BF16: _bf16,
    GGMLType.Q4_0: _q4_0,
    GGMLType.Q4_1: _q4_1,
    GGMLType.Q5_0: _q5_0,
    GGMLType.Q5_1: _q5_1,
    GGMLType.Q8_0: _q8_0,
    GGMLType.Q2_K: _q2_k,
    GGMLType.Q3_K: _q3_k,
    GGMLType.Q4_K: _q4_k,
    GGMLType.Q5_K: _q5_k,
    GGMLType.Q6_K: _q6_k,
    GGMLType.IQ4_NL: _iq4_nl,
    GGMLType.IQ4_XS: _iq4_xs,
    GGMLType.MXFP4: _mxfp4,
}
