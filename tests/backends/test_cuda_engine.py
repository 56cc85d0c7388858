"""The whole engine on the emulated driver: streams, saves, restores and cancellations at once.

With every check on: no race between the streams, nothing read that nobody wrote, nothing out of bounds. The trace
proves that nobody waits but the completion threads, and that nothing is allocated once the engine is open.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import trio
from cpu_streams import golden_model

pytest.importorskip("cuda.core")

from llamatrio.engine import saver
from llamatrio.engine.engine import Engine, open_engine
from llamatrio.engine.events import Finished
from llamatrio.sched.types import Request, SamplingParams
from tests.emucuda.control import ILLEGAL_ADDRESS, Control

MODEL = golden_model("tiny-qwen3-f16")
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
OPTIONS: dict[str, Any] = {"device": "cuda", "n_ctx": 256, "n_parallel": 8, "staging_mib": 1}
WAITS = ("cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize")


def prompt(n: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, 256, n).tolist())


async def run(engine: Engine, tokens: tuple[int, ...], n: int) -> tuple[list[int], Finished]:
    ids: list[int] = []
    with engine.start(Request(tokens, GREEDY, max_tokens=n)) as generation:
        async for event in generation:
            if isinstance(event, Finished):
                return ids, event
            ids += event.ids
    raise AssertionError("a generation ended without its last event")


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(120):
        while not condition():  # noqa: ASYNC110 (the engine has no event for it)
            await trio.sleep(0.005)


async def settled(engine: Engine) -> None:
    """Until every lane is idle and no save is under way."""
    await until(lambda: engine._cache.n_saving == 0 and not any(lane.is_processing for lane in engine.stats().lanes))


async def leave_early(engine: Engine, tokens: tuple[int, ...]) -> None:
    """A client that goes away in the middle of its stream."""
    with engine.start(Request(tokens, GREEDY, max_tokens=100)) as generation:
        async for _ in generation:
            return


async def serve_many(engine: Engine) -> None:
    """Eight streams and three clients that leave; then other prompts push them out, and two come back."""
    async with trio.open_nursery() as nursery:
        for i in range(8):
            nursery.start_soon(run, engine, prompt(9 + 3 * i, i), 4 + i)
        for i in range(3):
            nursery.start_soon(leave_early, engine, prompt(10, 40 + i))
    await settled(engine)
    for seed in (20, 21):
        await run(engine, prompt(120, seed), 2)
        await settled(engine)
    async with trio.open_nursery() as nursery:
        for i in (6, 7):
            nursery.start_soon(run, engine, prompt(9 + 3 * i, i), 3)
        nursery.start_soon(leave_early, engine, prompt(10, 50))
    await settled(engine)


@pytest.fixture
def host_access_is_checked(emucuda_checked: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checker hears of the copies between pinned memory and pages, which are the host's."""
    copy_out, copy_in = saver._copy_out, saver._copy_in

    def checked_out(buffer: Any, n: int) -> Any:
        emucuda_checked.host_reads(buffer.records.ctypes.data, buffer.records[:n].nbytes)
        return copy_out(buffer, n)

    def checked_in(records: Any, start: int, buffer: Any, n: int) -> None:
        emucuda_checked.host_writes(buffer.records.ctypes.data, buffer.records[:n].nbytes)
        copy_in(records, start, buffer, n)

    monkeypatch.setattr(saver, "_copy_out", checked_out)
    monkeypatch.setattr(saver, "_copy_in", checked_in)


async def test_a_served_scenario_has_no_race_and_nobody_waits(
    emucuda_checked: Control, host_access_is_checked: None
) -> None:
    async with open_engine(MODEL, **OPTIONS) as engine:
        emucuda_checked.forget_counts()
        emucuda_checked.set_tracing(True)
        await serve_many(engine)
        emucuda_checked.settle()
        calls, counts = emucuda_checked.trace(), emucuda_checked.counts()
        emucuda_checked.set_tracing(False)
        stats = engine.stats()
        assert stats.saves >= 10
        assert stats.restores >= 1
    assert emucuda_checked.findings() == []
    waiting = [call for call in calls if call.api in WAITS]
    assert waiting
    assert {call.thread for call in waiting} <= {"llamatrio-cuda-compute", "llamatrio-cuda-copy"}
    assert {call.api for call in waiting} == {"cuEventSynchronize"}
    assert all(call.result == 0 for call in calls)
    forbidden = ("copy.synchronous", "copy.pageable", "sync.implicit", "alloc", "free", "module.load", "cuEventCreate")
    assert not [name for name in counts if name.startswith(forbidden)]


async def test_evicted_prefixes_come_back_with_the_same_tokens(emucuda: Control) -> None:
    async with open_engine(MODEL, **OPTIONS) as engine:
        first, _ = await run(engine, prompt(40, 1), 10)
        await settled(engine)
        for seed in (2, 3):
            await run(engine, prompt(200, seed), 2)
            await settled(engine)
        again, finished = await run(engine, prompt(40, 1), 10)
        assert engine.stats().restores == 1
        assert finished.n_cached == 39
    assert again == first


async def test_streams_go_on_while_a_save_stands_still_and_a_cancelled_save_leaves_no_trace(emucuda: Control) -> None:
    async with open_engine(MODEL, **OPTIONS) as engine:
        expected, _ = await run(engine, prompt(20, 2), 8)
        await settled(engine)
        before = engine.stats()
        backend: Any = engine._backend
        with emucuda.held(backend._gpu.copy):
            await run(engine, prompt(30, 1), 2)
            await until(lambda: engine._cache.n_saving > 0)
            again, _ = await run(engine, prompt(20, 2), 8)
            assert again == expected
            assert engine.stats().saves == before.saves, "an entry is there before its copy has landed"
            assert engine._cache.n_saving > 0
        await settled(engine)
        assert engine.stats().saves > before.saves


async def test_leaving_keeps_the_device_until_a_cancelled_save_has_landed(emucuda: Control) -> None:
    released, before = False, emucuda.live().pinned_allocations

    async def release_later(copy: int) -> None:
        nonlocal released
        await trio.sleep(0.1)
        assert emucuda.live().pinned_allocations > before, "memory went while a copy into it was under way"
        released = True
        emucuda.release(copy)

    async with trio.open_nursery() as nursery:
        async with open_engine(MODEL, **OPTIONS) as engine:
            backend: Any = engine._backend
            emucuda.hold(backend._gpu.copy)
            await run(engine, prompt(30, 1), 2)
            await until(lambda: engine._cache.n_saving > 0)
            nursery.start_soon(release_later, emucuda.stream_id(backend._gpu.copy))
        assert released
    assert emucuda.live().pinned_allocations == before


async def test_a_broken_context_ends_every_request_with_an_error(emucuda: Control) -> None:
    async with open_engine(MODEL, **OPTIONS) as engine:
        await run(engine, prompt(20, 2), 2)
        await settled(engine)
        emucuda.fail_run("kernel", 3, ILLEGAL_ADDRESS)
        with trio.fail_after(60):
            _, finished = await run(engine, prompt(10, 3), 40)
            assert finished.reason == "error"
            assert "ILLEGAL_ADDRESS" in finished.error
            _, finished = await run(engine, prompt(10, 4), 4)
            assert finished.reason == "error"
    emucuda.reset()


async def test_a_failed_save_is_logged_and_the_server_goes_on(
    emucuda: Control, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_engine(MODEL, **OPTIONS) as engine:
        emucuda.fail_call("copy.d2h", 3)  # of the third: two steps come before the save
        first, _ = await run(engine, prompt(20, 2), 2)
        await settled(engine)
        assert "failed to save" in caplog.text
        assert engine.stats().cells_pinned == 0
        assert (await run(engine, prompt(20, 2), 2))[0] == first


@pytest.mark.parametrize("what", ["kernel", "graph.launch", "copy.h2d", "copy.d2h", "event.record"])
async def test_a_step_that_fails_ends_its_requests_with_the_reason_and_the_next_ones_are_as_ever(
    emucuda: Control, what: str
) -> None:
    async with open_engine(MODEL, **OPTIONS, cache_ram_mib=0) as engine:
        expected, _ = await run(engine, prompt(20, 2), 8)
        before = emucuda.live()
        with trio.fail_after(60):
            emucuda.fail_call(what, 4)
            _, finished = await run(engine, prompt(20, 3), 40)
            assert finished.reason == "error"
            assert "CUDA_ERROR" in finished.error
            assert "\n" not in finished.error
            again, _ = await run(engine, prompt(20, 2), 8)
        await settled(engine)
        stats = engine.stats()
        assert again == expected
        assert stats.cells_pinned == 0
        assert emucuda.live() == before


@pytest.mark.parametrize("what", ["kernel:scatter_cells", "copy.h2d", "event.record"])
async def test_a_failed_restore_is_logged_and_its_tokens_are_evaluated_again(
    emucuda: Control, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    caplog.set_level(logging.INFO, "llamatrio")
    async with open_engine(MODEL, **OPTIONS) as engine:
        first, _ = await run(engine, prompt(40, 1), 10)
        await settled(engine)
        for seed in (2, 3):
            await run(engine, prompt(200, seed), 2)
            await settled(engine)
        emucuda.fail_call(what, 1)
        with trio.fail_after(60):
            again, finished = await run(engine, prompt(40, 1), 10)
        await settled(engine)
        assert "failed to restore" in caplog.text
        assert "restored " not in caplog.text
        assert finished.n_cached == 0
        assert engine.stats().cells_pinned == 0
    assert again == first
