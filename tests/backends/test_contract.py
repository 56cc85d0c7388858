"""What every backend promises: one file for the CPU, for CUDA on the emulated driver, and for a real GPU (-m gpu)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu_streams import Piece, Stream, golden_model, log_softmax, make_batch, mean_kl, prompt_logits, step
from devices import DEVICES, Open, opener

from llamatrio.backends.base import Backend
from llamatrio.backends.cpu.reference import dequantized_tensors, reference_logits
from llamatrio.errors import BackendError
from llamatrio.model.arch import spec_from_gguf
from llamatrio.model.gguf import GGMLType, open_gguf
from llamatrio.model.spec import KVType
from tests.helpers_gguf import tiny_model

MODEL = "tiny-qwen3-f16"
QUANTIZED = "tiny-qwen3-wide-q4_k_m"
KV_TYPES: list[tuple[KVType, KVType]] = [("f16", "f16"), ("q8_0", "q8_0"), ("q8_0", "f16")]
N_CELLS = 160


@pytest.fixture(params=DEVICES)
def open_device(request: pytest.FixtureRequest) -> Open:
    return opener(request)


def tokens(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 288, n).astype(np.int32)


def scattered(seed: int = 2) -> np.ndarray:
    return np.random.default_rng(seed).permutation(N_CELLS).astype(np.int32)


def run_alone(backend: Backend, prompt: np.ndarray, generated: np.ndarray, cells: np.ndarray, lane: int = 0) -> list:
    stream = Stream(lane, cells)
    rows = [step(backend, Piece(stream, prompt)).full]
    rows += [step(backend, Piece(stream, [token], is_decode=True)).full for token in generated]
    return rows


# ---- numbers


@pytest.mark.parametrize("model", ["tiny-llama-f16", "tiny-qwen2-f16", "tiny-qwen3-f16", "tiny-gemma3-f16"])
def test_prompts_and_generated_tokens_agree_with_the_reference(open_device: Open, model: str) -> None:
    """Past gemma3's window of 32; the prompt in two uneven pieces, then tokens one by one."""
    ids = tokens(76)
    with open_gguf(golden_model(model)) as file:
        spec, tensors = spec_from_gguf(file), dequantized_tensors(file)
    expected = reference_logits(spec, tensors, ids, kv_type="f16")
    with open_device(model, n_cells=N_CELLS) as backend:
        stream = Stream(0, scattered())
        rows = [step(backend, Piece(stream, part)).full for part in (ids[:64], ids[64:71])]
        rows += [step(backend, Piece(stream, [token], is_decode=True)).full for token in ids[71:]]
    ours = np.concatenate(rows)
    assert mean_kl(expected, ours) < 1e-3
    np.testing.assert_allclose(ours, expected, atol=0.02 * np.abs(expected).max())


def small(path: Path, arch: str, **options: Any) -> Path:
    return tiny_model(path / "model.gguf", arch, n_ff=128, **options)


VARIANTS: dict[str, Callable[[Path], Path]] = {
    "a head of its own, YaRN, F32": lambda folder: small(
        folder, "llama", tied_head=False, type=GGMLType.F32,
        metadata={"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0,
                  "llama.rope.scaling.original_context_length": 32},
    ),
    "rope factors, F16 beside Q8_0": lambda folder: small(
        folder, "qwen3", type=GGMLType.Q8_0,
        tensors={"rope_freqs.weight": np.linspace(1, 8, 16).astype(np.float32),
                 **{f"blk.{i}.attn_v.weight": half((64, 64), i) for i in range(2)}},
    ),
    "soft-capped logits, MXFP4": lambda folder: small(
        folder, "gemma3", type=GGMLType.MXFP4, metadata={"gemma3.final_logit_softcapping": 2.0}
    ),
    "fused products, long rope factors, half of a head rotated": lambda folder: small(
        folder, "phi3", type=GGMLType.Q8_0,
        metadata={"phi3.rope.dimension_count": 16, "phi3.rope.scaling.original_context_length": 32,
                  "phi3.rope.scaling.attn_factor": 1.2},
        tensors={"rope_factors_short.weight": np.ones(8, np.float32),
                 "rope_factors_long.weight": np.linspace(1, 8, 8).astype(np.float32)},
    ),
    "both soft caps, small enough to bend": lambda folder: small(
        folder, "gemma2", n_layer=3,
        metadata={"gemma2.attn_logit_softcapping": 1.0, "gemma2.final_logit_softcapping": 2.0},
    ),
    "linear scale, a bias, seven heads to one": lambda folder: small(
        folder, "qwen2", n_head=7, n_head_kv=1,
        metadata={"qwen2.rope.scaling.type": "linear", "qwen2.rope.scaling.factor": 2.0},
    ),
}  # fmt: skip


def half(shape: tuple[int, int], seed: int) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) / 8).astype(np.float16)


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_models_may_have_agrees_with_the_reference(open_device: Open, tmp_path: Path, variant: str) -> None:
    path, ids = VARIANTS[variant](tmp_path), tokens(40)
    with open_gguf(path) as file:
        spec, tensors = spec_from_gguf(file), dequantized_tensors(file)
    expected = reference_logits(spec, tensors, ids, kv_type="f16")
    with open_device(path, n_cells=N_CELLS) as backend:
        prompt = prompt_logits(backend, ids, 40)
        generated = prompt_logits(backend, ids, 1, is_decode=True)
    assert mean_kl(expected, prompt) < 1e-3
    assert mean_kl(expected, generated) < 5e-3


@pytest.mark.parametrize("kv", KV_TYPES, ids="-".join)
def test_company_lane_and_cells_change_no_bit(open_device: Open, kv: tuple[KVType, KVType]) -> None:
    """A stream alone on neighbouring cells, and on scattered ones while others decode and read their prompts."""
    with open_device(QUANTIZED, n_cells=N_CELLS, n_lanes=8, type_k=kv[0], type_v=kv[1]) as backend:
        prompt, generated, cells = tokens(20), tokens(4, 1), scattered()
        alone = run_alone(backend, prompt, generated, np.arange(24))
        mine, others = Stream(3, cells[:24]), [Stream(lane, cells[30 + 20 * i :][:20]) for i, lane in enumerate((0, 6))]
        step(backend, *[Piece(other, tokens(5 + i, 7 + i)) for i, other in enumerate(others)])
        late = Stream(7, cells[80:120])
        decode = [Piece(other, [11], is_decode=True) for other in others]
        rows = [step(backend, *decode, Piece(mine, prompt)).full[2:]]
        for token in generated:
            pieces = [Piece(other, [13], is_decode=True) for other in others]
            pieces.insert(1, Piece(mine, [token], is_decode=True))
            rows.append(step(backend, *pieces, Piece(late, tokens(6, int(token)))).full[1:2])
    for here, there in zip(alone, rows, strict=True):
        np.testing.assert_array_equal(here, there)


def test_where_a_prompt_is_cut_changes_no_bit(open_device: Open) -> None:
    with open_device(QUANTIZED, n_cells=N_CELLS) as backend:
        whole = prompt_logits(backend, tokens(130), 130)
        np.testing.assert_array_equal(whole, prompt_logits(backend, tokens(130), 64, seed=1))


def test_a_long_row_does_not_depend_on_the_pool(open_device: Open) -> None:
    """Decode rows past 128 cells, which some devices split."""
    rows = []
    for n_cells in (300, 420):
        with open_device(MODEL, n_cells=n_cells) as backend:
            stream = Stream(0, np.arange(300)[::-1])
            step(backend, Piece(stream, tokens(290)))
            rows.append(step(backend, Piece(stream, [5], is_decode=True)).full)
    np.testing.assert_allclose(rows[0], rows[1], atol=1e-5)


# ---- results


def test_candidates_are_the_likeliest_of_the_whole_row(open_device: Open) -> None:
    with open_device(MODEL, n_cells=N_CELLS, n_lanes=2) as backend:
        first, second = Stream(0, np.arange(64)), Stream(1, np.arange(64, 128))
        step(backend, Piece(first, tokens(3)))
        output = step(backend, Piece(first, [4], is_decode=True), Piece(second, tokens(20)), n_candidates=50)
    assert output.ids.shape == output.logits.shape == (21, 50)
    order = np.argsort(-output.full, axis=1, kind="stable")[:, :50]
    np.testing.assert_array_equal(output.ids, order)
    np.testing.assert_array_equal(output.logits, np.take_along_axis(output.full, order, 1))
    expected = np.take_along_axis(log_softmax(output.full), order, 1)
    np.testing.assert_allclose(output.logits - output.logsumexp[:, None], expected, atol=1e-5)
    assert output.seconds > 0


def test_only_the_wanted_rows_have_results(open_device: Open) -> None:
    with open_device(MODEL, n_cells=N_CELLS, n_lanes=3) as backend:

        def pieces() -> list[Piece]:
            streams = [Stream(lane, np.arange(50 * lane, 50 * lane + 50)) for lane in range(3)]
            for stream in streams[:2]:
                step(backend, Piece(stream, tokens(2 + stream.lane)))
            return [*(Piece(s, [9], is_decode=True) for s in streams[:2]), Piece(streams[2], tokens(30))]

        everything = step(backend, *pieces(), n_candidates=3)
        batch = make_batch(pieces(), n_candidates=3)
        wanted, full = np.array([1, 6, 31], np.int32), np.array([2, 0], np.int32)
        batch.out_rows, batch.full_rows = wanted, full
        output = backend.forward(batch).result(timeout=120)
        np.testing.assert_array_equal(output.ids, everything.ids[wanted])
        np.testing.assert_array_equal(output.logits, everything.logits[wanted])
        np.testing.assert_array_equal(output.logsumexp, everything.logsumexp[wanted])
        np.testing.assert_array_equal(output.full, everything.full[wanted[full]])
        for stream_rows in (np.empty(0, np.int32), np.array([1], np.int32)):
            batch.out_rows, batch.full_rows = stream_rows, np.empty(0, np.int32)
            assert backend.forward(batch).result(timeout=120).ids.shape == (len(stream_rows), 3)


# ---- cells


@pytest.mark.parametrize("kv", KV_TYPES, ids="-".join)
def test_restored_cells_continue_with_the_same_bits(open_device: Open, kv: tuple[KVType, KVType]) -> None:
    with open_device(MODEL, n_cells=N_CELLS, n_lanes=3, type_k=kv[0], type_v=kv[1]) as backend:
        prompt, generated = tokens(30), tokens(4, 1)
        expected = run_alone(backend, prompt, generated, np.arange(100, 134))[1:]
        first = Stream(0, scattered()[:34])
        step(backend, Piece(first, prompt))
        staging = backend.new_staging(32)
        gather = backend.gather_cells(first.cells[:30], staging)
        gather.cells_free.result(timeout=60)
        step(backend, Piece(Stream(2, first.cells), tokens(34, 5)))  # writes over the old cells
        gather.landed.result(timeout=60)
        elsewhere = Stream(1, scattered()[40:74])
        backend.scatter_cells(staging, elsewhere.cells[:30]).result(timeout=60)
        elsewhere.n_past = 30
        rows = [step(backend, Piece(elsewhere, [token], is_decode=True)).full for token in generated]
    np.testing.assert_array_equal(rows, expected)


def test_a_gather_reads_what_the_step_before_it_wrote(open_device: Open) -> None:
    with open_device(MODEL, n_cells=N_CELLS) as backend:
        cells, staging, again = np.arange(16, dtype=np.int32), backend.new_staging(16), backend.new_staging(16)
        for seed in range(3):
            batch = make_batch([Piece(Stream(0, cells), tokens(16, seed))])
            queued = backend.forward(batch)
            backend.gather_cells(cells, staging).landed.result(timeout=60)  # queued while the step runs
            queued.result(timeout=60)
            backend.gather_cells(cells, again).landed.result(timeout=60)
            np.testing.assert_array_equal(staging.records, again.records)


def test_records_are_token_major(open_device: Open) -> None:
    with open_device(MODEL, n_cells=N_CELLS) as backend:
        layout = backend.layout
        assert layout.record_bytes == layout.n_layer * (layout.k_row_bytes + layout.v_row_bytes)
        one, both = backend.new_staging(1), backend.new_staging(2)
        assert (both.capacity, both.records.shape) == (2, (2, layout.record_bytes))
        step(backend, Piece(Stream(0, np.array([9, 4])), tokens(2)))
        backend.gather_cells(np.array([4], np.int32), one).landed.result(timeout=60)
        backend.gather_cells(np.array([9, 4], np.int32), both).landed.result(timeout=60)
        np.testing.assert_array_equal(both.records[1], one.records[0])
        nothing = backend.gather_cells(np.empty(0, np.int32), one)
        assert nothing.landed.result(timeout=60) is None
        assert backend.scatter_cells(one, np.empty(0, np.int32)).result(timeout=60) is None


# ---- misuse and the end

BAD_BATCHES = {
    "tokens": lambda batch: batch.tokens.__setitem__(0, 288),
    "positions": lambda batch: batch.positions.__setitem__(0, 5000),
    "cells": lambda batch: batch.cells.__setitem__(0, -1),
    "candidates": lambda batch: setattr(batch, "n_candidates", 257),
    "runs": lambda batch: setattr(batch, "runs", batch.runs[:0]),
    "int32": lambda batch: setattr(batch, "cell_table", batch.cell_table.astype(np.int64)),
}


def test_a_batch_that_does_not_fit_is_refused_and_changes_nothing(open_device: Open) -> None:
    with open_device(MODEL, n_cells=N_CELLS, max_rows=32) as backend:
        expected = run_alone(backend, tokens(8), tokens(2, 1), np.arange(12))
        stream = Stream(0, np.arange(12))
        step(backend, Piece(stream, tokens(8)))
        for what, spoil in BAD_BATCHES.items():
            batch = make_batch([Piece(Stream(0, np.arange(8)), tokens(8, 3))])
            spoil(batch)
            with pytest.raises(ValueError, match=what):
                backend.forward(batch)
        with pytest.raises(ValueError, match="rows"):
            backend.forward(make_batch([Piece(Stream(0, np.arange(64)), tokens(64, 3))]))
        with pytest.raises(ValueError, match="at most 2 cells"):
            backend.gather_cells(np.arange(3, dtype=np.int32), backend.new_staging(2))
        with pytest.raises(ValueError, match=f"below {N_CELLS}"):
            backend.scatter_cells(backend.new_staging(2), np.array([N_CELLS], np.int32))
        rows = [step(backend, Piece(stream, [token], is_decode=True)).full for token in tokens(2, 1)]
    np.testing.assert_array_equal(rows, expected[1:])


def test_a_closed_backend_says_so(open_device: Open) -> None:
    with open_device(MODEL, n_cells=N_CELLS) as backend:
        staging = backend.new_staging(1)
        assert backend.device
        assert (backend.n_cells, backend.max_rows, backend.spec.arch) == (N_CELLS, 512, "qwen3")
    backend.close()
    with pytest.raises(BackendError, match="closed"):
        backend.forward(make_batch([Piece(Stream(0, np.arange(8)), tokens(8))]))
    with pytest.raises(BackendError, match="closed"):
        backend.gather_cells(np.arange(1, dtype=np.int32), staging)


def test_closing_waits_for_what_is_queued(open_device: Open) -> None:
    with open_device(MODEL, n_cells=N_CELLS) as backend:
        staging = backend.new_staging(8)
        queued = backend.forward(make_batch([Piece(Stream(0, np.arange(40)), tokens(40))]))
        gather = backend.gather_cells(np.arange(8, dtype=np.int32), staging)
    assert queued.done()
    assert gather.landed.done()
    assert np.isfinite(queued.result().full).all()


def test_too_little_memory_names_what_would_fit(open_device: Open) -> None:
    with pytest.raises(BackendError, match=r"\d+ MiB are available; \d+ cells would fit"):
        open_device(MODEL, n_cells=2**30).__enter__()
