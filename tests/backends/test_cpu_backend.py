"""The CPU backend as a whole: whoever else runs, wherever the cells lie, a stream's numbers are the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from cpu_streams import Piece, Stream, golden_model, log_softmax, make_batch, prompt_logits, step

from llamatrio.backends.cpu import scratch, tables
from llamatrio.backends.cpu.backend import CpuBackend, open_cpu_backend
from llamatrio.backends.cpu.cells import CellPool
from llamatrio.backends.cpu.levels import current_level
from llamatrio.backends.cpu.machine import Machine, StepResults
from llamatrio.errors import BackendError, UnsupportedModelError
from llamatrio.model.spec import KVLayout, KVType
from llamatrio.sched.types import StepOutput

MODEL = "tiny-qwen3-wide-q4_k_m"
WINDOWED = "tiny-gemma3-f16"
KV_TYPES: list[tuple[KVType, KVType]] = [("f16", "f16"), ("q8_0", "q8_0"), ("q8_0", "f16")]


@pytest.fixture(scope="module", params=KV_TYPES, ids=lambda kinds: "-".join(kinds))
def backend(request: pytest.FixtureRequest) -> Iterator[CpuBackend]:
    type_k, type_v = request.param
    with open_cpu_backend(
        golden_model(MODEL), n_cells=2048, n_lanes=8, type_k=type_k, type_v=type_v, n_threads=2
    ) as opened:
        yield opened


def tokens(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 288, n).astype(np.int32)


def run_alone(backend: Any, prompt: np.ndarray, generated: np.ndarray, cells: np.ndarray, lane: int = 0) -> np.ndarray:
    stream = Stream(lane, cells)
    parts = [step(backend, Piece(stream, prompt)).full]
    parts += [step(backend, Piece(stream, [token], is_decode=True)).full for token in generated]
    return np.concatenate(parts)


@pytest.mark.parametrize("n_prompt", [5, 40, 200])
def test_company_lane_and_cells_change_no_bit(backend: CpuBackend, n_prompt: int) -> None:
    prompt, generated = tokens(n_prompt), tokens(12, 1)
    alone = run_alone(backend, prompt, generated, np.arange(n_prompt + 12))
    scattered = np.random.default_rng(2).permutation(2048).astype(np.int32)
    np.testing.assert_array_equal(alone, run_alone(backend, prompt, generated, scattered[: n_prompt + 12], lane=5))

    mine = Stream(3, scattered[:300])
    others = [Stream(lane, scattered[300 + 200 * i : 500 + 200 * i]) for i, lane in enumerate((0, 1, 6))]
    for i, other in enumerate(others):
        step(backend, Piece(other, tokens(20 + 30 * i, 7 + i)))
    batch = [Piece(others[0], [7], is_decode=True), Piece(others[1], tokens(33, 9)), Piece(mine, prompt)]
    rows = [step(backend, *batch).full[-n_prompt:]]
    for token in generated:
        company = [Piece(other, [11], is_decode=True) for other in others]
        rows.append(step(backend, company[0], Piece(mine, [token], is_decode=True), *company[1:]).full[1:2])
    np.testing.assert_array_equal(alone, np.concatenate(rows))


def test_many_rows_at_once_change_no_bit(backend: CpuBackend) -> None:
    """More short pieces than members can keep privately: rows then have owners."""
    pieces = [tokens(9 + i, 20 + i) for i in range(8)]
    alone = [step(backend, Piece(Stream(0, np.arange(40)), piece)).full for piece in pieces]
    streams = [Stream(lane, np.arange(100 * lane, 100 * lane + 40)) for lane in range(8)]
    together = step(backend, *[Piece(stream, piece) for stream, piece in zip(streams, pieces, strict=True)]).full
    np.testing.assert_array_equal(together, np.concatenate(alone))


@pytest.mark.parametrize("model", [MODEL, WINDOWED])
def test_the_number_of_threads_changes_no_bit(model: str) -> None:
    results = []
    for n_threads in (1, 2, 3):
        with open_cpu_backend(golden_model(model), n_cells=512, n_threads=n_threads) as backend:
            logits = run_alone(backend, tokens(150), tokens(8, 1), np.arange(200)[::-1])
            stream = Stream(0, np.arange(400))
            step(backend, Piece(stream, tokens(300)))
            output = step(backend, Piece(stream, [3], is_decode=True), n_candidates=40)
            results.append((logits, output))
    for logits, output in results[1:]:
        np.testing.assert_array_equal(logits, results[0][0])
        np.testing.assert_array_equal(output.ids, results[0][1].ids)
        np.testing.assert_array_equal(output.logsumexp, results[0][1].logsumexp)


@pytest.mark.parametrize("kinds", KV_TYPES)
@pytest.mark.parametrize("model", [MODEL, WINDOWED])
def test_rows_with_more_chunks_than_there_are_states_change_no_bit(
    model: str, kinds: tuple[KVType, KVType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then whole rows are given out instead of chunks."""
    monkeypatch.setattr(scratch, "_STATE_BYTES", 0)
    with open_cpu_backend(
        golden_model(model), n_cells=512, n_lanes=8, type_k=kinds[0], type_v=kinds[1], n_threads=2
    ) as backend:
        step(backend, Piece(Stream(0, np.arange(400)), tokens(400)))
        pieces = []
        for lane in range(8):
            stream = Stream(lane, [*range(400), 400 + lane])
            stream.n_past = 400
            pieces.append(Piece(stream, [lane + 3], is_decode=True))
        alone = []
        for piece in pieces:
            alone.append(step(backend, piece).full)
            assert backend._machine.step[tables.BY_CHUNKS]
            piece.stream.n_past -= 1
        together = step(backend, *pieces).full
        assert not backend._machine.step[tables.BY_CHUNKS]
    np.testing.assert_array_equal(together, np.concatenate(alone))


def test_where_a_prompt_is_cut_changes_no_bit(backend: CpuBackend) -> None:
    prompt = tokens(230)
    whole = prompt_logits(backend, prompt, 230)
    np.testing.assert_array_equal(whole, prompt_logits(backend, prompt, 64, seed=1))
    np.testing.assert_array_equal(whole, prompt_logits(backend, prompt, 128, seed=2))


def test_candidates_are_the_likeliest_of_the_whole_row(backend: CpuBackend) -> None:
    output = step(backend, Piece(Stream(0, np.arange(64)), tokens(37)), n_candidates=50)
    order = np.argsort(-output.full, axis=1, kind="stable")[:, :50]
    np.testing.assert_array_equal(output.ids, order)
    np.testing.assert_array_equal(output.logits, np.take_along_axis(output.full, order, 1))
    logprobs = output.logits - output.logsumexp[:, None]
    expected = np.take_along_axis(log_softmax(output.full), order, 1)
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)


def test_only_the_wanted_rows_have_results(backend: CpuBackend) -> None:
    stream = Stream(0, np.arange(64))
    everything = step(backend, Piece(stream, tokens(50)), n_candidates=3)
    batch = make_batch([Piece(Stream(0, np.arange(64)), tokens(50))], n_candidates=3)
    batch.out_rows, batch.full_rows = np.array([4, 49], np.int32), np.array([1], np.int32)
    output = backend.forward(batch).result()
    np.testing.assert_array_equal(output.ids, everything.ids[[4, 49]])
    np.testing.assert_array_equal(output.logsumexp, everything.logsumexp[[4, 49]])
    np.testing.assert_array_equal(output.full, everything.full[[49]])
    batch.out_rows, batch.full_rows = np.empty(0, np.int32), np.empty(0, np.int32)
    assert backend.forward(batch).result().ids.shape == (0, 3)


def test_restored_cells_continue_with_the_same_bits(backend: CpuBackend) -> None:
    prompt, generated = tokens(100), tokens(10, 1)
    expected = run_alone(backend, prompt, generated, np.arange(300, 420))[100:]
    first = Stream(0, np.arange(500, 620))
    step(backend, Piece(first, prompt))
    staging = backend.new_staging(128)
    gather = backend.gather_cells(first.cells[:100], staging)
    gather.cells_free.result(timeout=60)
    gather.landed.result(timeout=60)
    # Other streams write over the old cells.
    step(backend, Piece(Stream(2, np.arange(500, 620)), tokens(120, 5)))
    elsewhere = Stream(1, np.random.default_rng(3).permutation(np.arange(700, 820)))
    backend.scatter_cells(staging, elsewhere.cells[:100]).result(timeout=60)
    elsewhere.n_past = 100
    rows = [step(backend, Piece(elsewhere, [token], is_decode=True)).full for token in generated]
    np.testing.assert_array_equal(np.concatenate(rows), expected)


@pytest.mark.parametrize("pause_us", [0, 1])
@pytest.mark.parametrize("row_bytes", [(1024, 2048), (48, 16)])
def test_records_are_the_cells_whatever_the_slices(row_bytes: tuple[int, int], pause_us: int) -> None:
    layout, n = KVLayout("cpu-2", 20, *row_bytes), 40  # of the larger records a slice holds two
    memory = np.random.default_rng(0).integers(0, 256, n * layout.record_bytes, np.uint8)
    pool = CellPool(layout, n, memory.copy(), current_level())
    cells = np.random.default_rng(1).permutation(n)[:33].astype(np.int32)
    records = np.zeros((33, layout.record_bytes), np.uint8)
    pool.gather(cells, records, np.array([pause_us], np.int32))
    layers = np.split(memory, 20)
    for cell, record in zip(cells, records, strict=True):
        rows = []
        for layer in layers:
            k, v = np.split(layer, [n * row_bytes[0]])
            rows += [k.reshape(n, -1)[cell], v.reshape(n, -1)[cell]]
        np.testing.assert_array_equal(record, np.concatenate(rows))
    pool.memory[:] = 0
    pool.scatter(records, cells, np.array([pause_us], np.int32))
    again = np.zeros_like(records)
    pool.gather(cells, again)
    np.testing.assert_array_equal(again, records)
    others = np.setdiff1d(np.arange(n), cells).astype(np.int32)
    untouched = np.ones((len(others), layout.record_bytes), np.uint8)
    pool.gather(others, untouched)
    assert not untouched.any()


def test_a_gather_reads_what_the_steps_before_it_wrote(backend: CpuBackend) -> None:
    cells = np.arange(64, dtype=np.int32)
    batches = [make_batch([Piece(Stream(0, cells), tokens(64, seed))]) for seed in range(4)]
    kept = []
    for batch in batches:  # nothing is awaited in between
        backend.forward(batch)
        staging = backend.new_staging(64)
        kept.append((backend.gather_cells(cells, staging), staging))
        kept[-1][0].landed.result(timeout=60)
    for batch, (_, staging) in zip(batches, kept, strict=True):
        backend.forward(batch).result(timeout=60)
        again = backend.new_staging(64)
        backend.gather_cells(cells, again).landed.result(timeout=60)
        np.testing.assert_array_equal(staging.records, again.records)


def test_a_restore_does_not_wait_for_a_save(backend: CpuBackend) -> None:
    """Somebody waits for the one, nobody for the other."""
    step_that_lasts: Future[StepOutput] = Future()
    backend._last_step = step_that_lasts
    save = backend.gather_cells(np.arange(8, dtype=np.int32), backend.new_staging(8))
    restore = backend.scatter_cells(backend.new_staging(4), np.arange(100, 104, dtype=np.int32))
    restore.result(timeout=30)
    assert not save.landed.done()
    step_that_lasts.set_exception(BackendError("it is over"))
    save.landed.result(timeout=30)


@pytest.mark.parametrize("where", [(Machine, "load_batch"), (StepResults, "step_output")], ids=["before", "after"])
def test_a_fault_beside_a_step_reaches_whoever_waits_and_the_next_step_runs(
    backend: CpuBackend, where: tuple[type, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no room for the results")

    batch = make_batch([Piece(Stream(0, np.arange(8)), tokens(8))])
    with monkeypatch.context() as patch:
        patch.setattr(*where, fail)
        with pytest.raises(MemoryError, match="no room for the results"):
            backend.forward(batch).result(timeout=30)
    assert len(backend.forward(batch).result(timeout=30).ids) == 8


def test_records_are_token_major(backend: CpuBackend) -> None:
    layout = backend.layout
    assert layout.name == "cpu-2"
    assert layout.record_bytes == layout.n_layer * (layout.k_row_bytes + layout.v_row_bytes)
    one, both = backend.new_staging(1), backend.new_staging(2)
    step(backend, Piece(Stream(0, np.array([9, 4])), tokens(2)))
    backend.gather_cells(np.array([4], np.int32), one).landed.result(timeout=60)
    backend.gather_cells(np.array([9, 4], np.int32), both).landed.result(timeout=60)
    np.testing.assert_array_equal(both.records[1], one.records[0])


BAD_BATCHES = {
    "tokens": lambda batch: batch.tokens.__setitem__(0, 288),
    "positions": lambda batch: batch.positions.__setitem__(0, 5000),
    "cells": lambda batch: batch.cells.__setitem__(0, -1),
    "candidates": lambda batch: setattr(batch, "n_candidates", 257),
    "runs": lambda batch: setattr(batch, "runs", batch.runs[:0]),
    "int32": lambda batch: setattr(batch, "cell_table", batch.cell_table.astype(np.int64)),
}


@pytest.mark.parametrize("what", BAD_BATCHES)
def test_a_batch_that_does_not_fit_is_refused(backend: CpuBackend, what: str) -> None:
    batch = make_batch([Piece(Stream(0, np.arange(8)), tokens(8))])
    BAD_BATCHES[what](batch)
    with pytest.raises(ValueError, match=what):
        backend.forward(batch)


def test_cells_beyond_the_staging_buffer_are_refused(backend: CpuBackend) -> None:
    with pytest.raises(ValueError, match="at most 2 cells"):
        backend.gather_cells(np.arange(3, dtype=np.int32), backend.new_staging(2))
    with pytest.raises(ValueError, match="below 2048"):
        backend.scatter_cells(backend.new_staging(2), np.array([2048], np.int32))


def test_a_closed_backend_says_so() -> None:
    with open_cpu_backend(golden_model(MODEL), n_cells=64, n_threads=2) as backend:
        assert "2 threads" in backend.device
    backend.close()
    with pytest.raises(BackendError, match="closed"):
        backend.forward(make_batch([Piece(Stream(0, np.arange(8)), tokens(8))]))


def test_too_little_memory_names_what_would_fit() -> None:
    with pytest.raises(BackendError, match=r"\d+ MiB are available; \d+ cells would fit"):
        open_cpu_backend(golden_model(MODEL), n_cells=2**36).__enter__()


@pytest.mark.parametrize(
    ("model", "lacking"),
    [
        ("more/tiny-qwen3moe-f16", "no mixtures of experts, which qwen3moe needs"),
        ("more/tiny-gpt-oss-mxfp4", "no mixtures of experts and no attention sinks, which gpt-oss needs"),
    ],
)
def test_what_the_kernels_lack_is_named_with_who_has_it(model: str, lacking: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"^the CPU backend has {lacking}; the CUDA backend runs it$"):
        open_cpu_backend(golden_model(model), n_cells=64).__enter__()


def test_a_head_size_without_whole_blocks_is_refused_for_q8_0() -> None:
    from dataclasses import replace

    from llamatrio.backends.cpu.machine import check_spec
    from llamatrio.model.arch import spec_from_gguf
    from llamatrio.model.gguf import open_gguf

    with open_gguf(golden_model(MODEL)) as file:
        spec = replace(spec_from_gguf(file), head_dim=80, n_head=2)
    check_spec(spec, "f16", "f16")
    with pytest.raises(UnsupportedModelError, match="multiple of 32, not 80"):
        check_spec(spec, "f16", "q8_0")
