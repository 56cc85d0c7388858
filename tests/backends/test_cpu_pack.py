"""Packing: what comes out is what went in, wherever it was put."""

from __future__ import annotations

import numpy as np
import pytest

from llamatrio.backends.cpu.levels import Level
from llamatrio.backends.cpu.pack import FORMATS, check_matrix, group_bytes, pack, packed_bytes
from llamatrio.errors import UnsupportedModelError
from llamatrio.model.ggml_type import GGMLType, block_shape
from tests import emuamx
from tests.backends.cpu_matrices import aligned, random_rows

each_type = pytest.mark.parametrize("type", tuple(FORMATS), ids=lambda type: type.name)


def packed(type: GGMLType, raw: np.ndarray, k: int, level: Level | None = None) -> np.ndarray:
    out = aligned(packed_bytes(type, len(raw), k))
    pack(type, raw, out, level=level)
    return out


def test_q4_1_by_hand() -> None:
    """One tile: vector v holds rows' bytes 4 v .. 4 v + 3, then the 16 scales, then the 16 minima."""
    raw = random_rows(GGMLType.Q4_1, 16, 32)
    out = packed(GGMLType.Q4_1, raw, 32)
    for row in range(16):
        for v in range(4):
            at = 64 * v + 4 * row
            assert bytes(out[at : at + 4]) == bytes(raw[row, 4 + 4 * v : 8 + 4 * v])
        assert bytes(out[256 + 2 * row : 258 + 2 * row]) == bytes(raw[row, :2])
        assert bytes(out[288 + 2 * row : 290 + 2 * row]) == bytes(raw[row, 2:4])


@each_type
def test_packed_weights_take_little_more_than_the_file(type: GGMLType) -> None:
    n_weights, n_bytes = block_shape(type)
    in_file = 16 * 1024 // n_weights * n_bytes
    assert in_file * 0.99 <= packed_bytes(type, 16, 1024) <= in_file * 1.04


@each_type
def test_parts_of_a_matrix_are_packed_where_they_belong(type: GGMLType) -> None:
    k = 256
    raw = random_rows(type, 55, k)
    whole = packed(type, raw, k)
    out = aligned(len(whole))
    pack(type, raw[32:], out, first_group=2)
    pack(type, raw[:32], out)
    np.testing.assert_array_equal(out, whole)


@each_type
def test_two_matrices_are_interleaved_by_groups(type: GGMLType) -> None:
    k = 256
    gate, up = random_rows(type, 48, k, seed=1), random_rows(type, 48, k, seed=2)
    out = aligned(packed_bytes(type, 96, k))
    pack(type, gate, out, first_group=0, step=2)
    pack(type, up, out, first_group=1, step=2)
    groups = out.reshape(6, group_bytes(type, k))
    np.testing.assert_array_equal(groups[0::2].reshape(-1), packed(type, gate, k))
    np.testing.assert_array_equal(groups[1::2].reshape(-1), packed(type, up, k))


@pytest.mark.parametrize("type", [GGMLType.Q5_0, GGMLType.Q3_K, GGMLType.F16], ids=lambda type: type.name)
def test_every_level_packs_alike(type: GGMLType) -> None:
    raw = random_rows(type, 16, 256)
    results = [packed(type, raw, 256, level) for level in emuamx.levels()]
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


def test_rows_may_be_a_slice_of_a_wider_array() -> None:
    raw = random_rows(GGMLType.Q8_0, 20, 64)
    wide = np.zeros((20, 100), np.uint8)
    wide[:, :68] = raw
    np.testing.assert_array_equal(packed(GGMLType.Q8_0, wide[:, :68], 64), packed(GGMLType.Q8_0, raw, 64))


def test_misuse_is_refused_before_anything_is_written() -> None:
    raw = random_rows(GGMLType.Q4_0, 32, 64)
    out = np.zeros(packed_bytes(GGMLType.Q4_0, 32, 64), np.uint8)
    with pytest.raises(ValueError, match="whole blocks"):
        pack(GGMLType.Q4_0, raw[:, :-1], out)
    with pytest.raises(ValueError, match="room for the group 2"):
        pack(GGMLType.Q4_0, raw, out, first_group=1)
    with pytest.raises(ValueError, match="contiguous"):
        pack(GGMLType.Q4_0, raw, out[::1].reshape(2, -1))
    assert not out.any()


def test_a_matrix_without_a_kernel_is_named() -> None:
    check_matrix("blk.0.ffn_up.weight", GGMLType.Q4_K, 512)
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.ffn_up\.weight.*IQ2_XS"):
        check_matrix("blk.0.ffn_up.weight", GGMLType.IQ2_XS, 512)
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.ffn_up\.weight.*multiple of 32 weights, not 40"):
        check_matrix("blk.0.ffn_up.weight", GGMLType.F16, 40)
