from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from llamatrio.errors import UnsupportedModelError
from llamatrio.model.quants import GGMLType, block_shape, can_dequantize, dequantize, quantize_q8_0

KNOWN = [type for type in GGMLType if can_dequantize(type)]


def half(value: float) -> bytes:
    return struct.pack("<e", value)


def at(n_bytes: int, **values: int) -> bytes:
    """Zeros but for the bytes named `b<index>`."""
    out = bytearray(n_bytes)
    for name, value in values.items():
        out[int(name[1:])] = value
    return bytes(out)


# One block of each format by hand: its bytes, the weights that are set apart, and what all others are.
BLOCKS = {
    "F32": (struct.pack("<f", 1.5), {0: 1.5}, 0.0),
    "F16": (bytes([0x00, 0x3E]), {0: 1.5}, 0.0),
    "BF16": (bytes([0xC0, 0x3F]), {0: 1.5}, 0.0),
    # Low nibble 15 is weight 0, high nibble 2 is weight 16; 8 is zero.
    "Q4_0": (half(0.5) + bytes([0x2F] + [0x88] * 15), {0: 3.5, 16: -3.0}, 0.0),
    "Q4_1": (half(0.5) + half(1) + bytes([0x2F] + [0] * 15), {0: 8.5, 16: 2.0}, 1.0),
    # The fifth bit of weight 0 is set: 31 - 16.
    "Q5_0": (half(0.5) + at(4, b0=1) + at(16, b0=0x2F), {0: 7.5, 16: -7.0}, -8.0),
    "Q5_1": (half(0.5) + half(1) + at(4, b0=1) + at(16, b0=0x2F), {0: 16.5, 16: 2.0}, 1.0),
    "Q8_0": (half(0.5) + struct.pack("32b", -3, *[0] * 30, 127), {0: -1.5, 31: 63.5}, 0.0),
    # Group 0: scale 1, minimum 2; group 2: scale 3. The first quant byte holds weights 0, 32, 64 and 96.
    "Q2_K": (
        at(16, b0=0x21, b2=0x03) + at(64, b0=0b11100100) + half(2) + half(0.5),
        dict.fromkeys(range(16), -1.0) | {32: 6.0},
        0.0,
    ),
    # All scales 32 (none) but group 0's, 35. Weight 0 is 2 with its third bit set, the rest of the group 0.
    "Q3_K": (
        at(32, b0=1) + at(64, b0=2) + at(8, b0=3) + bytes([0xAA] * 4) + half(1),
        {0: 6.0} | dict.fromkeys(range(1, 16), -12.0),
        0.0,
    ),
    # Group 0: scale 2, minimum 3. Group 4: scale 17, its upper bits above group 0's scale.
    "Q4_K": (
        half(1) + half(0.5) + at(12, b0=0x42, b4=3, b8=0x01) + at(128, b0=0x5A, b64=0x01),
        {0: 18.5} | dict.fromkeys(range(1, 32), -1.5) | {128: 17.0},
        0.0,
    ),
    "Q5_K": (
        half(1) + half(0.5) + at(12, b0=2, b4=3) + at(32, b0=1) + at(128, b0=0x5A),
        {0: 50.5} | dict.fromkeys(range(1, 32), -1.5),
        0.0,
    ),
    # Weight 0: 26 - 32 by scale -2. Weight 64: 5 - 32 by scale 1.
    "Q6_K": (
        at(128, b0=0x5A) + at(64, b0=1) + struct.pack("16b", -2, 0, 0, 0, 1, *[0] * 11) + half(0.5),
        {0: 6.0} | dict.fromkeys(range(1, 16), 32.0) | {64: -13.5} | dict.fromkeys(range(65, 80), -16.0),
        0.0,
    ),
    "IQ4_NL": (half(0.5) + bytes([0xF0] + [0x88] * 15), {0: -63.5, 16: 56.5}, 0.5),
    # All scales 32 (none) but group 0's, 33, and group 1's, 34.
    "IQ4_XS": (
        half(1) + bytes([0xAA, 0xAA]) + at(4, b0=0x21) + bytes([0xF0] + [0x88] * 127),
        {0: -127.0, 16: 113.0} | {i: 1.0 for i in range(1, 32) if i != 16} | dict.fromkeys(range(32, 64), 2.0),
        0.0,
    ),
    "MXFP4": (bytes([128, 0x71, 0xF9] + [0] * 14), {0: 1.0, 16: 12.0, 1: -1.0, 17: -12.0}, 0.0),
}


def test_every_format_has_a_block_by_hand() -> None:
    assert set(BLOCKS) == {type.name for type in KNOWN}


@pytest.mark.parametrize("name", BLOCKS)
def test_block_by_hand(name: str) -> None:
    raw, apart, others = BLOCKS[name]
    type = GGMLType[name]
    n_weights, n_bytes = block_shape(type)
    assert len(raw) == n_bytes
    expected = np.full(n_weights, others, np.float32)
    for index, value in apart.items():
        expected[index] = value
    np.testing.assert_array_equal(dequantize(np.frombuffer(raw, np.uint8), type), expected)


@pytest.mark.parametrize("type", [type for type in KNOWN if type != GGMLType.F32], ids=lambda type: type.name)
def test_random_bytes_as_gguf_py_reads_them(type: GGMLType) -> None:
    n_weights, n_bytes = block_shape(type)
    raw = np.random.default_rng(7).integers(0, 256, (3, 2, 4 * n_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        ours = dequantize(raw, type)
        reference = gguf.quants.dequantize(raw.reshape(6, -1), gguf.GGMLQuantizationType(int(type)))
    assert ours.shape == (3, 2, 4 * n_weights)
    assert ours.dtype == np.float32
    np.testing.assert_array_equal(ours.reshape(6, -1), reference)


def test_types_we_do_not_read_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="IQ2_XXS"):
        dequantize(np.zeros(66, np.uint8), GGMLType.IQ2_XXS)
    with pytest.raises(ValueError, match="blocks of 34 bytes"):
        dequantize(np.zeros(35, np.uint8), GGMLType.Q8_0)


def test_q8_0_of_the_smallest_numbers_is_zero() -> None:
    weights = np.full((1, 32), 6.7722036e-38, np.float32)
    weights[0, 0] = -1e-45
    assert not dequantize(quantize_q8_0(weights), GGMLType.Q8_0).any()


# Below 1e-30 the oracle itself divides by what has no inverse.
magnitudes = st.floats(-1e4, 1e4, width=32).map(lambda x: x if abs(x) > 1e-30 else 0.0)


@given(arrays(np.float32, (2, 64), elements=magnitudes))
def test_q8_0_is_ggmls(weights: np.ndarray) -> None:
    ours = quantize_q8_0(weights)
    np.testing.assert_array_equal(ours, gguf.quants.quantize(weights, gguf.GGMLQuantizationType.Q8_0))
    largest = np.abs(weights.reshape(-1, 32)).max(axis=1, keepdims=True)
    error = np.abs(dequantize(ours, GGMLType.Q8_0) - weights).reshape(-1, 32)
    assert (error <= np.maximum(0.0045 * largest, 4e-5)).all()


def test_q8_0_of_zeros_is_exact_and_of_ragged_rows_refused() -> None:
    assert not quantize_q8_0(np.zeros(32, np.float32)).any()
    with pytest.raises(ValueError, match="multiple of 32"):
        quantize_q8_0(np.zeros(33, np.float32))
