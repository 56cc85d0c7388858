"""The sketch of the head: never below the truth, and what it finds is what the whole head gives, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cpu_streams import Piece, Stream, golden_model, make_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from llamatrio.backends.cpu import tables, weights
from llamatrio.backends.cpu.backend import CpuBackend, open_cpu_backend
from llamatrio.backends.cpu.compile import compile_kernel, python_function
from llamatrio.backends.cpu.levels import Level
from llamatrio.backends.cpu.linear import embed_kernel, linear_kernels
from llamatrio.backends.cpu.machine import _LONGEST_PAUSE, _Screening
from llamatrio.backends.cpu.pack import Packing, pack, packed_bytes
from llamatrio.backends.cpu.rows import quantized_rows
from llamatrio.backends.cpu.screen import MOST_SCREENED
from llamatrio.backends.cpu.sketch import LONGEST_ROW, Q8_SKETCH, lengths_kernel
from llamatrio.backends.cpu.whole_rows import Q8_WHOLE, score_kernel
from llamatrio.model.ggml_type import GGMLType
from llamatrio.sched.types import StepOutput
from tests import emuamx
from tests.backends.cpu_matrices import aligned, random_activations, random_rows, to_q8

MODEL = "tiny-qwen3-wide-q8_0"
each_level = pytest.mark.parametrize("level", emuamx.levels(), ids=lambda level: level.name)


def packed(packing: Packing, raw: np.ndarray, k: int, level: Level) -> np.ndarray:
    out = aligned(packed_bytes(packing, len(raw), k))
    pack(packing, raw, out, level=level)
    return out


def product(kernel: int, matrix: np.ndarray, x: np.ndarray, n: int, k: int) -> np.ndarray:
    """float32 [m, n rounded up to 16]"""
    out = np.full((len(x), -(-n // 16) * 16), np.nan, np.float32)
    run = python_function(kernel, 8)
    run(matrix.ctypes.data, x.ctypes.data, out.ctypes.data, len(x), k, out.strides[0], 0, out.shape[1] // 16)
    return out


def bounds(raw: np.ndarray, x: np.ndarray, k: int, level: Level) -> np.ndarray:
    python_function(lengths_kernel(level), 3)(x.ctypes.data, len(x), k)
    kernel = compile_kernel("rows_q8_0_sketch", quantized_rows(Q8_SKETCH), level)
    return product(kernel, packed(Q8_SKETCH, raw, k, level), x, len(raw), k)[:, : len(raw)]


def logits(raw: np.ndarray, x: np.ndarray, k: int, level: Level) -> np.ndarray:
    matrix = packed(GGMLType.Q8_0, raw, k, level)
    return product(linear_kernels(GGMLType.Q8_0, level).rows, matrix, x, len(raw), k)[:, : len(raw)]


# ---- rows that stay whole


@each_level
@pytest.mark.parametrize("m", [1, 3, 8, 17])
def test_whole_rows_give_the_same_bits_as_interleaved_ones(level: Level, m: int) -> None:
    k, n = 384, 53
    raw, x = random_rows(GGMLType.Q8_0, n, k), to_q8(random_activations(m, k), level)
    whole = product(linear_kernels(Q8_WHOLE, level).rows, packed(Q8_WHOLE, raw, k, level), x, n, k)
    np.testing.assert_array_equal(whole[:, :n], logits(raw, x, k, level))


@each_level
def test_a_whole_row_is_embedded_as_an_interleaved_one(level: Level) -> None:
    k, n = 256, 40
    raw, found = random_rows(GGMLType.Q8_0, n, k), []
    for packing in (GGMLType.Q8_0, Q8_WHOLE):
        matrix, out = packed(packing, raw, k, level), np.empty((n, k), np.float32)
        for row in range(n):
            python_function(embed_kernel(packing, level), 4)(matrix.ctypes.data, row, out[row].ctypes.data, k)
        found.append(out)
    np.testing.assert_array_equal(*found)


@each_level
def test_single_rows_are_scored_with_the_bits_of_the_whole_product(level: Level) -> None:
    k, n = 640, 300
    raw, x = random_rows(GGMLType.Q8_0, n, k), to_q8(random_activations(1, k), level)
    ids = np.random.default_rng(3).integers(0, n, 48).astype(np.int32)
    out, matrix = np.full(n, np.nan, np.float32), packed(Q8_WHOLE, raw, k, level)
    run = python_function(score_kernel(level), 6)
    run(matrix.ctypes.data, x.ctypes.data, out.ctypes.data, k, ids.ctypes.data, 32)
    expected = logits(raw, x, k, level)[0]
    np.testing.assert_array_equal(out[ids[:32]], expected[ids[:32]])
    assert np.isnan(np.delete(out, ids[:32])).all()


# ---- the bound


@each_level
@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_a_bound_is_never_below_the_logit(level: Level, data: st.DataObject) -> None:
    """Also where what the sketch leaves out adds up: equal codes, extreme ones, activations that follow the rest."""
    k = data.draw(st.sampled_from([32, 128, 1024, LONGEST_ROW]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    raw = random_rows(GGMLType.Q8_0, 16, k, seed=int(rng.integers(1 << 30))).reshape(16, k // 32, 34)
    kind = data.draw(st.sampled_from(["random", "equal", "extreme"]))
    if kind == "equal":
        raw[..., 2:] = rng.integers(0, 256, (16, k // 32, 1), np.uint8)
    elif kind == "extreme":
        raw[..., 2:] = rng.choice(np.array([127, 128, 129, 0, 15, 16, 240], np.uint8), (16, k // 32, 32))
    scale = np.float16(10.0 ** data.draw(st.integers(-7, 1)))
    raw[..., :2] = np.array([scale * data.draw(st.sampled_from([-1, 1]))], np.float16).view(np.uint8)
    x = random_activations(2, k, seed=int(rng.integers(1 << 30)))
    if data.draw(st.booleans()):  # in the direction of what is left out of row 0
        left_out = ((raw[0, :, 2:] ^ 128) & 15).astype(np.float32) - 7.5
        x[0] = left_out.ravel() * np.sign(np.float32(scale))
    rows = raw.reshape(16, -1)
    records = to_q8(x, level)
    assert (bounds(rows, records, k, level) >= logits(rows, records, k, level)).all()


@each_level
def test_a_bound_is_close_enough_to_be_of_use(level: Level) -> None:
    k = 640
    raw, x = random_rows(GGMLType.Q8_0, 512, k), to_q8(random_activations(4, k), level)
    exact = logits(raw, x, k, level)
    over = bounds(raw, x, k, level) - exact
    assert (over.mean(axis=1) < 3 * exact.std(axis=1)).all()


# ---- the step


@pytest.fixture(scope="module", params=[1, 2, 3], ids=lambda n: f"{n} threads")
def backend(request: pytest.FixtureRequest) -> Iterator[CpuBackend]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "LEAST_SHARE", 0.0)
        with open_cpu_backend(golden_model(MODEL), n_cells=2048, n_lanes=20, n_threads=request.param) as opened:
            assert opened._machine.step[tables.SKETCH]
            yield opened


def decode(backend: Any, n_rows: int, n_candidates: int, *, needs_sums: bool, seed: int = 0) -> StepOutput:
    """One step of n_rows streams that have all seen something else."""
    rng = np.random.default_rng(seed)
    streams = [Stream(lane, np.arange(100 * lane, 100 * lane + 100)) for lane in range(n_rows)]
    for stream in streams:
        prompt = make_batch([Piece(stream, rng.integers(0, 288, 20))], n_lanes=20)
        backend.forward(prompt).result()
    pieces = [Piece(stream, [int(rng.integers(0, 288))], is_decode=True) for stream in streams]
    batch = make_batch(pieces, n_lanes=20, n_candidates=n_candidates)
    batch.full_rows, batch.needs_sums = np.empty(0, np.int32), needs_sums
    output: StepOutput = backend.forward(batch).result()
    return output


@pytest.mark.parametrize("n_rows", [1, 2, 8, 20])
@pytest.mark.parametrize("n_candidates", [1, 3, 40, MOST_SCREENED])
def test_what_is_found_is_what_the_whole_head_gives(backend: CpuBackend, n_rows: int, n_candidates: int) -> None:
    screening = backend._machine._screening
    for seed in range(4):
        screening._n_paused = screening._n_scored[0] = 0
        found = decode(backend, n_rows, n_candidates, needs_sums=False, seed=seed)
        assert backend._machine.step[tables.BY_SKETCH]
        assert screening._n_scored[0] >= n_rows * n_candidates
        expected = decode(backend, n_rows, n_candidates, needs_sums=True, seed=seed)
        assert not backend._machine.step[tables.BY_SKETCH]
        np.testing.assert_array_equal(found.ids, expected.ids)
        np.testing.assert_array_equal(found.logits, expected.logits)
        assert np.isfinite(expected.logsumexp).all()


def test_more_candidates_than_are_worth_it_take_the_whole_head(backend: CpuBackend) -> None:
    output = decode(backend, 1, MOST_SCREENED + 1, needs_sums=False)
    assert not backend._machine.step[tables.BY_SKETCH]
    assert np.isfinite(output.logsumexp).all()


def test_a_head_kept_whole_gives_the_bits_of_an_ordinary_one(
    backend: CpuBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "LEAST_SHARE", 1.0)
    with open_cpu_backend(golden_model(MODEL), n_cells=2048, n_lanes=20, n_threads=2) as ordinary:
        assert not ordinary._machine.step[tables.SKETCH]
        expected = decode(ordinary, 5, 10, needs_sums=True)
    found = decode(backend, 5, 10, needs_sums=True)
    np.testing.assert_array_equal(found.ids, expected.ids)
    np.testing.assert_array_equal(found.logits, expected.logits)
    np.testing.assert_array_equal(found.logsumexp, expected.logsumexp)


# ---- whether it pays


def test_tries_that_do_not_pay_become_rare() -> None:
    n_scored = np.zeros(1, np.int64)
    screening = _Screening(n_scored, n_vocab=300)
    tried = []
    for step in range(3000):
        if screening.begin():
            tried.append(step)
            n_scored[0] = 101
    gaps = np.diff(tried)
    assert tried[0] == 0
    assert gaps[0] <= 3
    assert (np.diff(gaps) >= 0).all()
    assert gaps[-1] in (_LONGEST_PAUSE, _LONGEST_PAUSE + 1)


def test_after_one_that_pays_a_bad_step_costs_a_short_pause_only() -> None:
    n_scored = np.zeros(1, np.int64)
    screening = _Screening(n_scored, n_vocab=300)
    for _ in range(20):
        assert screening.begin()
        n_scored[0] = 100
    n_scored[0] = 101
    assert [screening.begin() for _ in range(3)].count(False) <= 2
