"""The matrix products of every type at every level this machine has, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from llamatrio.backends.cpu.activations import BLOCK_BYTES
from llamatrio.backends.cpu.compile import python_function
from llamatrio.backends.cpu.levels import Level
from llamatrio.backends.cpu.linear import embed_kernel, linear_kernels, row_stride
from llamatrio.backends.cpu.pack import FORMATS
from llamatrio.backends.cpu.panel import CHUNK, LONGEST_CHUNK, scratch_bytes
from llamatrio.model.ggml_type import GGMLType
from tests import emuamx
from tests.backends.cpu_matrices import (
    Matrix,
    aligned,
    from_q8,
    random_activations,
    round_to_bf16,
    to_q8,
    to_tiles,
)

LEVELS = emuamx.levels()
TYPES = tuple(FORMATS)
ROW_COUNTS = (1, 2, 3, 5, 8, 16, 17)
AMX = [level for level in LEVELS if level.has_amx]

each_type = pytest.mark.parametrize("type", TYPES, ids=lambda type: type.name)
each_level = pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)


def size_of_terms(weights: np.ndarray, x: np.ndarray) -> np.ndarray:
    """[m, n] sum of |w x|: rounding errors of a sum are in proportion to it."""
    return np.abs(x).astype(np.float64) @ np.abs(weights).astype(np.float64).T


class Rows:
    """The rows kernel of a type on one matrix."""

    def __init__(self, type: GGMLType, matrix: Matrix, level: Level) -> None:
        kernels = linear_kernels(type, level)
        self.matrix, self.form, self.level = matrix, kernels.rows_form, level
        self.run = python_function(kernels.rows, 8)

    def prepare(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The activations in the kernel's form, and the numbers they stand for."""
        if self.form == "f32":
            return x, x.astype(np.float64)
        records = to_q8(x, self.level)
        return records, from_q8(records)

    def __call__(self, prepared: np.ndarray, g0: int = 0, g1: int | None = None) -> np.ndarray:
        """[m, 16 n_groups]; columns that the kernel did not write are NaN."""
        matrix, m = self.matrix, len(prepared)
        out = np.full((m, 16 * matrix.n_groups), np.nan, np.float32)
        g1 = matrix.n_groups if g1 is None else g1
        self.run(matrix.packed.ctypes.data, prepared.ctypes.data, out.ctypes.data, m, matrix.k, out.strides[0], g0, g1)
        return out


@each_level
@each_type
def test_rows_equal_the_exact_product_of_what_they_were_given(type: GGMLType, level: Level) -> None:
    matrix = Matrix(type, 75, 512)  # the last group is short
    rows = Rows(type, matrix, level)
    x = random_activations(max(ROW_COUNTS), matrix.k)
    prepared, exact_x = rows.prepare(x)
    exact = exact_x @ matrix.weights.astype(np.float64).T
    tolerance = 2e-6 * size_of_terms(matrix.weights, exact_x)
    for m in ROW_COUNTS:
        out = rows(prepared[:m])
        assert np.all(np.abs(out[:, : matrix.n] - exact[:m]) <= tolerance[:m])
        assert np.all(out[:, matrix.n :] == 0)


@each_level
@each_type
def test_a_row_is_the_same_bits_in_any_company(type: GGMLType, level: Level) -> None:
    matrix = Matrix(type, 48, 256)
    rows = Rows(type, matrix, level)
    prepared, _ = rows.prepare(random_activations(70, matrix.k))
    alone = np.concatenate([rows(prepared[r : r + 1]) for r in range(70)])
    for first, last in ((0, 2), (0, 3), (3, 8), (1, 17), (5, 36), (0, 70)):
        np.testing.assert_array_equal(rows(prepared[first:last]), alone[first:last])


@each_type
def test_threads_can_share_a_product_by_groups(type: GGMLType) -> None:
    matrix = Matrix(type, 80, 256)
    rows = Rows(type, matrix, LEVELS[-1])
    prepared, _ = rows.prepare(random_activations(3, matrix.k))
    whole = rows(prepared)
    for g0, g1 in ((0, 1), (1, 4), (4, 5), (2, 2)):
        part = rows(prepared, g0, g1)
        np.testing.assert_array_equal(part[:, 16 * g0 : 16 * g1], whole[:, 16 * g0 : 16 * g1])
        assert np.isnan(part[:, : 16 * g0]).all()
        assert np.isnan(part[:, 16 * g1 :]).all()


NARROW_TYPES = [type for type in TYPES if getattr(FORMATS[type], "offset", 0) != 128]


@pytest.mark.parametrize("type", NARROW_TYPES, ids=lambda type: type.name)
def test_levels_with_fma_agree_in_every_bit(type: GGMLType) -> None:
    """But for 8-bit codes, which are signed where VNNI is missing: the sums are equal, their rounding is not."""
    levels = [level for level in LEVELS if level.has_fma]
    if len(levels) < 2:
        pytest.skip("this processor has fewer than two levels with fused multiply-add")
    matrix = Matrix(type, 32, 256)
    results = []
    for level in levels:
        rows = Rows(type, matrix, level)
        prepared, _ = rows.prepare(random_activations(5, matrix.k))
        results.append(rows(prepared))
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


@each_level
@pytest.mark.parametrize("type", [GGMLType.Q4_0, GGMLType.Q8_0, GGMLType.Q5_1], ids=lambda type: type.name)
def test_integer_products_are_exact(type: GGMLType, level: Level) -> None:
    """With scales of 1 everything is an integer below 2^24, the extreme codes included: no rounding, no saturation."""
    n, k = 16, 64
    rng = np.random.default_rng(3)
    matrix = Matrix(type, n, k)
    halves = {GGMLType.Q5_1: 64}.get(type, 32)
    codes = matrix.packed.reshape(k // 32, -1)
    codes[:, :-halves] = rng.choice(np.array([0, 1, 0x7F, 0x80, 0xFF], np.uint8), codes[:, :-halves].shape)
    codes[:, -halves:] = np.ones(halves // 2, np.float16).view(np.uint8)
    embed = python_function(embed_kernel(type, level), 4)
    weights = np.empty((n, k), np.float32)
    for row in range(n):
        embed(matrix.packed.ctypes.data, row, weights[row].ctypes.data, k)
    assert np.array_equal(weights, np.rint(weights))

    x = rng.choice(np.array([-127, -1, 0, 1, 127], np.float32), (9, k))
    x[:, ::32] = 127
    rows = Rows(type, matrix, level)
    prepared, exact_x = rows.prepare(x)
    np.testing.assert_array_equal(exact_x, x)
    np.testing.assert_array_equal(rows(prepared), x.astype(np.float64) @ weights.astype(np.float64).T)


@each_level
@each_type
def test_embed_gives_the_weights(type: GGMLType, level: Level) -> None:
    matrix = Matrix(type, 35, 256)
    embed = python_function(embed_kernel(type, level), 4)
    out = np.empty(matrix.k, np.float32)
    for row in (0, 1, 15, 16, 34):
        embed(matrix.packed.ctypes.data, row, out.ctypes.data, matrix.k)
        np.testing.assert_allclose(out, matrix.weights[row], rtol=3e-7, atol=1e-8)


def test_output_rows_lie_an_odd_number_of_lines_apart() -> None:
    for n in (1, 16, 17, 1024, 1536, 4096):
        assert row_stride(n) >= 4 * n
        assert row_stride(n) % 128 == 64


# ---- panels


class Panel:
    """The panel kernel of a type on one matrix."""

    def __init__(self, type: GGMLType, matrix: Matrix, level: Level) -> None:
        kernels = linear_kernels(type, level)
        assert kernels.panel is not None
        self.matrix, self.level, self.form = matrix, level, kernels.panel_form
        self.run = python_function(kernels.panel, 9)
        self.scratch = aligned(scratch_bytes(matrix.k))

    def __call__(self, x: np.ndarray, g0: int = 0, g1: int | None = None) -> np.ndarray:
        matrix, m = self.matrix, len(x)
        tiles = to_tiles(x, self.form, self.level)
        out = np.full((m, 16 * matrix.n_groups), np.nan, np.float32)
        self.run(
            matrix.packed.ctypes.data,
            tiles.ctypes.data,
            out.ctypes.data,
            self.scratch.ctypes.data,
            m,
            matrix.k,
            out.strides[0],
            g0,
            matrix.n_groups if g1 is None else g1,
        )
        return out


def seen_by_panel(type: GGMLType, weights: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float64 weights and activations as the panel multiplies them: rounded to bf16, or for F16 weights to f16."""
    if type == GGMLType.F16:
        return weights.astype(np.float64), x.astype(np.float16).astype(np.float64)
    return round_to_bf16(weights).astype(np.float64), round_to_bf16(x).astype(np.float64)


PANEL_TYPES = [type for type in TYPES if type != GGMLType.F32]
needs_amx = emuamx.needs_amx()
each_panel_type = pytest.mark.parametrize("type", PANEL_TYPES, ids=lambda type: type.name)


@needs_amx
@each_panel_type
def test_panel_is_the_product_of_bf16(type: GGMLType) -> None:
    matrix = Matrix(type, 75, 512)
    panel = Panel(type, matrix, AMX[0])
    x = random_activations(49, matrix.k)
    weights, rounded_x = seen_by_panel(type, matrix.weights, x)
    exact = rounded_x @ weights.T
    # A weight on the border between two bf16 may go either way, as ours is rounded once more or less than NumPy's.
    tolerance = 4e-5 * size_of_terms(weights, rounded_x)
    for m in (1, 5, 16, 17, 32, 33, 49):
        out = panel(x[:m])
        assert np.all(np.abs(out[:, : matrix.n] - exact[:m]) <= tolerance[:m])
        assert np.all(out[:, matrix.n :] == 0)


@needs_amx
@pytest.mark.parametrize(
    ("type", "k"),
    [
        *((GGMLType.Q4_1, k) for k in (32, CHUNK, LONGEST_CHUNK, LONGEST_CHUNK + 32, CHUNK + LONGEST_CHUNK)),
        (GGMLType.Q4_K, 3 * CHUNK + 256),
        (GGMLType.F16, 2 * CHUNK),
    ],
)
def test_panel_sums_over_chunks_of_k(type: GGMLType, k: int) -> None:
    matrix = Matrix(type, 80, k)
    x = random_activations(35, matrix.k)
    weights, rounded_x = seen_by_panel(type, matrix.weights, x)
    out = Panel(type, matrix, AMX[0])(x)
    assert np.all(np.abs(out - rounded_x @ weights.T) <= 4e-5 * size_of_terms(weights, rounded_x))


@needs_amx
@pytest.mark.parametrize(
    "type", [GGMLType.Q4_1, GGMLType.Q6_K, GGMLType.BF16, GGMLType.F16], ids=lambda type: type.name
)
def test_a_panel_row_is_the_same_bits_in_any_company(type: GGMLType) -> None:
    matrix = Matrix(type, 48, 256)
    panel = Panel(type, matrix, AMX[0])
    x = random_activations(70, matrix.k)
    whole = panel(x)
    for first, last in ((0, 1), (1, 2), (3, 20), (20, 53), (38, 70), (69, 70)):
        np.testing.assert_array_equal(panel(x[first:last]), whole[first:last])


@needs_amx
def test_threads_can_share_a_panel_product_by_groups() -> None:
    matrix = Matrix(GGMLType.Q4_1, 16 * 37, 64)
    panel = Panel(GGMLType.Q4_1, matrix, AMX[0])
    x = random_activations(34, matrix.k)
    whole = panel(x)
    for g0, g1 in ((0, 1), (1, 4), (3, 37), (36, 37), (2, 2)):
        part = panel(x, g0, g1)
        np.testing.assert_array_equal(part[:, 16 * g0 : 16 * g1], whole[:, 16 * g0 : 16 * g1])
        assert np.isnan(part[:, : 16 * g0]).all()
        assert np.isnan(part[:, 16 * g1 :]).all()


# ---- activations


@each_level
def test_q8_records_are_as_documented(level: Level) -> None:
    x = random_activations(6, 96)
    x[2, 32:64] = 0
    records = to_q8(x, level)
    blocks = x.reshape(6, 3, 32)
    largest = np.abs(blocks).max(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        inverse = np.where(largest == 0, np.float32(0), np.float32(127) / largest)
    codes = np.rint(blocks * inverse)
    low, high = codes[..., :16].sum(-1), codes[..., 16:].sum(-1)
    scale = largest[..., 0] / np.float32(127)
    assert records.shape[-1] == BLOCK_BYTES
    np.testing.assert_array_equal(records[..., :32].view(np.int8), codes)
    fields = np.ascontiguousarray(records[..., 32:48]).view(np.float32)
    np.testing.assert_array_equal(fields, np.stack([scale, low + high, low, high], -1))


@each_level
def test_tiles_are_as_documented(level: Level) -> None:
    x = random_activations(19, 96)
    bf16 = to_tiles(x, "bf16", level).view(np.uint16).reshape(2, 3, 16, 32)
    f16 = to_tiles(x, "f16", level).view(np.float16).reshape(2, 3, 16, 32)
    for row in (0, 15, 16, 18):
        values = bf16[row // 16, :, row % 16].reshape(-1)
        np.testing.assert_array_equal(values.astype(np.uint32) << 16, round_to_bf16(x[row]).view(np.uint32))
        np.testing.assert_array_equal(f16[row // 16, :, row % 16].reshape(-1), x[row].astype(np.float16))
