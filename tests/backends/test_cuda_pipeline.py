"""The CUDA backend's host code on the emulated driver: calls, streams, faults. Numbers are test_contract's."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.core")

from cpu_streams import Piece, Stream, golden_model, make_batch, step

from llamatrio.backends.cuda.backend import CudaBackend, open_cuda_backend
from llamatrio.errors import BackendError
from llamatrio.model.spec import KVType
from tests.emucuda.control import ILLEGAL_ADDRESS, Control

MODEL = "tiny-qwen3-f16"
SYNCHRONIZES = ("sync.stream", "sync.context", "sync.implicit", "copy.synchronous", "copy.pageable")


@contextmanager
def opened(**options: Any) -> Iterator[CudaBackend]:
    with open_cuda_backend(golden_model(MODEL), **{"n_cells": 96, "n_lanes": 2, **options}) as backend:
        yield backend


def tokens(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 288, n).astype(np.int32)


def sampled(stream: Stream, token: int = 7) -> Any:
    """A decode step of one row, as the engine makes it: candidates only."""
    batch = make_batch([Piece(stream, [token], is_decode=True)], n_candidates=40)
    batch.full_rows = np.empty(0, np.int32)
    return batch


def assert_fails(future: Future[Any]) -> None:
    with pytest.raises(BackendError):
        future.result(timeout=60)


# ---- what the driver is asked for


@pytest.mark.parametrize("kv", ["f16", "q8_0"])
@pytest.mark.parametrize(("n", "stride"), [(1, 1), (10, 1), (10, 3), (30, 1), (30, 3)])
def test_calls_of_a_save_depend_on_neither_tokens_nor_fragments(
    emucuda: Control, kv: KVType, n: int, stride: int
) -> None:
    with opened(type_k=kv, type_v=kv) as backend:
        staging, cells = backend.new_staging(32), np.arange(0, n * stride, stride, dtype=np.int32)
        step(backend, Piece(Stream(0, np.arange(90)), tokens(90)))
        emucuda.forget_counts()
        backend.gather_cells(cells, staging).landed.result(timeout=60)
        counts = emucuda.counts()
        assert (counts["kernel:gather_cells"], counts["copy.d2h"], counts["copy.h2d"]) == (1, 1, 1)
        assert (counts["cuLaunchKernelEx"], counts["event.record"], counts["event.wait"]) == (1, 2, 1)
        assert counts["copy.d2h.bytes"] == n * backend.layout.record_bytes
        assert not any(counts[name] for name in SYNCHRONIZES)
        emucuda.forget_counts()
        backend.scatter_cells(staging, cells).result(timeout=60)
        counts = emucuda.counts()
        assert (counts["kernel:scatter_cells"], counts["copy.d2h"], counts["copy.h2d"]) == (1, 0, 2)
        assert (counts["cuLaunchKernelEx"], counts["event.record"], counts["event.wait"]) == (1, 1, 0)
        assert not any(counts[name] for name in SYNCHRONIZES)


@pytest.mark.parametrize("n_rows", [1, 2])
def test_a_decode_step_is_one_upload_one_graph_the_choice_and_one_download(emucuda: Control, n_rows: int) -> None:
    with opened() as backend:
        streams = [Stream(lane, np.arange(40 * lane, 40 * lane + 40)) for lane in range(n_rows)]
        step(backend, *[Piece(stream, tokens(5)) for stream in streams])
        emucuda.forget_counts()
        for _ in range(3):
            batch = make_batch([Piece(stream, [3], is_decode=True) for stream in streams], n_candidates=40)
            batch.full_rows = np.empty(0, np.int32)
            backend.forward(batch).result(timeout=60)
        counts = emucuda.counts()
        assert (counts["cuGraphLaunch"], counts["cuLaunchKernelEx"]) == (3, 6)
        assert (counts["copy.h2d"], counts["copy.d2h"]) == (3, 3)
        assert counts["copy.d2h.bytes"] == 3 * n_rows * (40 * 8 + 4)
        assert not any(counts[name] for name in SYNCHRONIZES)
        assert not any(n for name, n in counts.items() if name.startswith(("alloc", "free", "module", "cuEventCreate")))


# ---- streams


def test_steps_go_on_while_the_copy_stream_stands_still(emucuda: Control) -> None:
    with opened() as backend:
        stream, staging = Stream(0, np.arange(40)), backend.new_staging(8)
        step(backend, Piece(stream, tokens(8)))
        with emucuda.held(backend._gpu.copy):
            gather = backend.gather_cells(np.arange(8, dtype=np.int32), staging)
            assert gather.cells_free.done(), "by the order of the streams the cells are free at once"
            for _ in range(5):
                assert backend.forward(sampled(stream)).result(timeout=60).ids.shape == (1, 40)
            assert not gather.landed.done()
        gather.landed.result(timeout=60)


def test_a_restore_under_way_holds_up_no_step(emucuda: Control) -> None:
    with opened() as backend:
        stream, staging = Stream(0, np.arange(40)), backend.new_staging(8)
        step(backend, Piece(stream, tokens(8)))
        backend.gather_cells(np.arange(8, dtype=np.int32), staging).landed.result(timeout=60)
        with emucuda.held(backend._gpu.copy):
            restore = backend.scatter_cells(staging, np.arange(60, 68, dtype=np.int32))
            for _ in range(3):
                backend.forward(sampled(stream)).result(timeout=60)
            assert not restore.done()
        restore.result(timeout=60)


def test_cells_that_are_written_over_at_once_are_saved_as_they_were(emucuda_checked: Control) -> None:
    """No race between the gather, the step that takes its cells, and the copies of both."""
    with opened() as backend:
        cells, staging, again = np.arange(20, dtype=np.int32), backend.new_staging(20), backend.new_staging(20)
        step(backend, Piece(Stream(0, cells), tokens(20)))
        backend.gather_cells(cells, again).landed.result(timeout=60)
        with emucuda_checked.held(backend._gpu.compute):
            gather = backend.gather_cells(cells, staging)
            taken = backend.forward(make_batch([Piece(Stream(1, cells), tokens(20, 9))]))
        taken.result(timeout=60)
        restore = backend.scatter_cells(again, np.arange(40, 60, dtype=np.int32))
        for future in (gather.landed, restore):
            future.result(timeout=60)
        np.testing.assert_array_equal(staging.records, again.records)


def test_a_restore_may_be_the_first_to_use_a_staging_buffer(emucuda_checked: Control) -> None:
    """Memory is allocated in the order of the compute stream, and used by the copy stream."""
    with opened() as backend:
        staging = backend.new_staging(4)
        staging.records[:] = 0
        backend.scatter_cells(staging, np.arange(4, dtype=np.int32)).result(timeout=60)
        again = backend.new_staging(4)
        backend.gather_cells(np.arange(4, dtype=np.int32), again).landed.result(timeout=60)
        assert not again.records.any()


def test_a_scatter_into_cells_that_a_gather_freed_comes_after_it(emucuda_checked: Control) -> None:
    with opened() as backend:
        cells, one, two = np.arange(20, dtype=np.int32), backend.new_staging(20), backend.new_staging(20)
        step(backend, Piece(Stream(0, cells), tokens(20)))
        step(backend, Piece(Stream(1, cells + 40), tokens(20, 5)))
        backend.gather_cells(cells + 40, two).landed.result(timeout=60)
        with emucuda_checked.held(backend._gpu.compute):
            gather = backend.gather_cells(cells, one)
            restore = backend.scatter_cells(two, cells)
        gather.landed.result(timeout=60)
        restore.result(timeout=60)
        backend.gather_cells(cells, one).landed.result(timeout=60)
        np.testing.assert_array_equal(one.records, two.records)


# ---- faults

AT_START = ["alloc", "cuStreamCreateWithPriority", "cuEventCreate", "cuLibraryLoadData", "cuGraphInstantiateWithParams",
            "copy.h2d", "kernel", "event.record"]  # fmt: skip


def owned(emucuda: Control) -> tuple[int, ...]:
    """What is there to leak. What a broken context held stays with it, so tests compare, and do not expect zero."""
    live = emucuda.live()
    return live.device_allocations, live.pinned_allocations, live.streams, live.events, live.graphs


def error_of_opening() -> BackendError | None:
    try:
        with opened(n_cells=32) as backend:
            backend.new_staging(4)
    except BackendError as error:
        return error
    return None


@pytest.mark.parametrize("what", AT_START)
def test_a_fault_at_start_is_one_clear_error_and_leaks_nothing(emucuda: Control, what: str) -> None:
    failed, before = 0, owned(emucuda)
    for nth in range(1, 60):
        emucuda.reset()
        emucuda.fail_call(what, nth)
        error = error_of_opening()
        if error is None:
            break
        failed += 1
        assert "\n" not in str(error)
        assert "OUT_OF_MEMORY" in str(error) or "event" in str(error)
        emucuda.settle()
        assert owned(emucuda) == before
        if nth > 6 and what in ("kernel", "cuLibraryLoadData", "copy.h2d", "event.record"):
            break
    assert failed >= {"alloc": 6, "cuStreamCreateWithPriority": 2, "cuEventCreate": 10}.get(what, 1)


STEP_FAULTS = ["copy.h2d", "graph.launch", "kernel:top_k_part", "kernel:top_k_merge", "copy.d2h", "event.record"]


@pytest.mark.parametrize("what", STEP_FAULTS)
def test_a_step_that_cannot_be_enqueued_fails_and_the_next_one_runs(emucuda: Control, what: str) -> None:
    with opened() as backend:
        stream = Stream(0, np.arange(40))
        step(backend, Piece(stream, tokens(8)))
        expected = backend.forward(sampled(stream)).result(timeout=60)
        stream.n_past -= 1
        emucuda.fail_call(what, 1)
        assert_fails(backend.forward(sampled(stream)))
        stream.n_past -= 1
        again = backend.forward(sampled(stream)).result(timeout=60)
        np.testing.assert_array_equal(again.logits, expected.logits)


@pytest.mark.parametrize("nth", [1, 5, 20])
def test_a_prompt_of_which_a_launch_fails_can_be_given_again(emucuda: Control, nth: int) -> None:
    with opened() as backend:
        expected = step(backend, Piece(Stream(0, np.arange(40)), tokens(8))).full
        emucuda.fail_call("kernel", nth)
        assert_fails(backend.forward(make_batch([Piece(Stream(0, np.arange(40)), tokens(8))])))
        again = step(backend, Piece(Stream(0, np.arange(40)), tokens(8))).full
        np.testing.assert_array_equal(again, expected)


@pytest.mark.parametrize("what", ["copy.h2d", "kernel:gather_cells", "event.record", "event.wait", "copy.d2h"])
def test_a_save_that_cannot_be_enqueued_fails_and_the_next_one_runs(emucuda: Control, what: str) -> None:
    with opened() as backend:
        staging, cells = backend.new_staging(8), np.arange(8, dtype=np.int32)
        step(backend, Piece(Stream(0, cells), tokens(8)))
        backend.gather_cells(cells, staging).landed.result(timeout=60)
        expected = staging.records.copy()
        staging.records[:] = 0
        emucuda.fail_call(what, 1)
        assert_fails(backend.gather_cells(cells, staging).landed)
        backend.gather_cells(cells, staging).landed.result(timeout=60)
        np.testing.assert_array_equal(staging.records, expected)
        for call in ("copy.h2d", "kernel:scatter_cells", "event.record"):
            emucuda.fail_call(call, 1)
            assert_fails(backend.scatter_cells(staging, cells + 20))
        backend.scatter_cells(staging, cells + 20).result(timeout=60)


@pytest.mark.parametrize("what", ["kernel", "graph.launch", "copy.h2d", "copy.d2h"])
def test_an_error_of_the_context_reaches_everybody_who_waits(emucuda: Control, what: str) -> None:
    with opened() as backend:
        stream, one, two = Stream(0, np.arange(40)), backend.new_staging(8), backend.new_staging(8)
        cells = np.arange(8, dtype=np.int32)
        step(backend, Piece(stream, tokens(8)))
        backend.gather_cells(cells, two).landed.result(timeout=60)
        with emucuda.held(backend._gpu.compute), emucuda.held(backend._gpu.copy):
            waiting = [backend.forward(sampled(stream))]
            waiting.append(backend.gather_cells(cells, one).landed)
            waiting.append(backend.scatter_cells(two, cells + 50))
            emucuda.fail_run(what if what != "graph.launch" else "kernel", 1, ILLEGAL_ADDRESS)
        for future in waiting:
            assert future.exception(timeout=60) is None or isinstance(future.exception(), BackendError)
        assert any(future.exception() for future in waiting)
        for _ in range(3):
            assert_fails(backend.forward(sampled(stream)))
        gather = backend.gather_cells(cells, one)
        assert_fails(gather.landed)
        assert_fails(gather.cells_free)
        assert_fails(backend.scatter_cells(two, cells))
    emucuda.reset()


# ---- opening


def test_some_layers_only_are_refused(emucuda: Control) -> None:
    with pytest.raises(BackendError, match=r"n_gpu_layers is 1, but the model's \d+ layers"):
        opened(n_gpu_layers=1).__enter__()
    for n in (-1, 99):
        with opened(n_gpu_layers=n) as backend:
            assert "Emulated GPU" in backend.device


def test_loading_tells_how_far_it_is(emucuda: Control) -> None:
    """To the end, also where a file has tensors that no upload is for."""
    told: list[tuple[int, int]] = []
    with open_cuda_backend(golden_model("tiny-llama-f16"), n_cells=32, on_progress=lambda *n: told.append(n)):
        done, total = zip(*told, strict=True)
    assert list(done) == sorted(done)
    assert set(total) == {done[-1]}
    assert len(told) > 20


def test_memory_is_planned_before_it_is_taken(emucuda: Control) -> None:
    emucuda.set_memory(280 << 20)
    emucuda.forget_counts()
    with pytest.raises(BackendError, match=r"24 MiB are available; \d+ cells would fit"):
        opened(n_cells=100_000).__enter__()
    assert emucuda.counts()["alloc.device_pool"] == 0


def test_only_so_many_steps_in_flight(emucuda: Control) -> None:
    with opened() as backend:
        stream = Stream(0, np.arange(40))
        with emucuda.held(backend._gpu.compute):
            queued = [backend.forward(sampled(stream)) for _ in range(2)]
            with pytest.raises(ValueError, match="ended"):
                backend.forward(sampled(stream))
        for future in queued:
            future.result(timeout=60)
