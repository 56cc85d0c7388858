"""The engine as a whole on the fake device: every answer proves that the right cells were used."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from llamatrio.engine.engine import Engine
from llamatrio.engine.events import Finished, TokenEvent
from llamatrio.engine.generation import MAX_BEHIND, Generation
from llamatrio.errors import BackendError, ContextOverflowError, LlamatrioError, OverloadedError, RequestError
from llamatrio.sched.sampler import Choice
from llamatrio.sched.stops import MAX_STOP
from llamatrio.sched.types import Batch, Request, SamplingParams, StepOutput
from tests.fakes import N_VOCAB, FakeBackend, reference

GREEDY = SamplingParams(temperature=0.0)
with_and_without_staging = pytest.mark.parametrize("needs_staging", [True, False], ids=["staging", "direct"])


def prompt(n: int, salt: int = 1) -> tuple[int, ...]:
    return tuple((salt * 13 + i * i) % 60 + 1 for i in range(n))


async def run(engine: Engine, request: Request) -> tuple[list[int], str, Finished]:
    ids: list[int] = []
    text = ""
    with engine.start(request) as generation:
        async for event in generation:
            if isinstance(event, Finished):
                return ids, text, event
            ids += event.ids
            text += event.text
    raise AssertionError("a generation ended without its last event")


async def settled(engine: Engine) -> None:
    """Waits until nothing is under way."""
    await wait_all_tasks_blocked()
    engine._scheduler.check_invariants()


async def test_streams_that_run_together_each_get_their_own_text(open_fake, autojump_clock) -> None:
    async with open_fake(FakeBackend(512), n_parallel=4) as engine:
        results = {}

        async def one(salt: int) -> None:
            results[salt] = await run(engine, Request(prompt(20, salt), GREEDY, max_tokens=30))

        async with trio.open_nursery() as nursery:
            for salt in range(9):
                nursery.start_soon(one, salt)
        for salt, (ids, _, finished) in results.items():
            assert ids == reference(prompt(20, salt), 30)
            assert finished.n_predicted == len(ids)
            assert finished.reason == ("stop" if ids[-1] == 0 else "length")
        await settled(engine)
        assert engine.stats().cells_used == engine.stats().cells_idle


async def test_b08_a_prompt_that_is_known_whole_evaluates_exactly_one_token(open_fake, autojump_clock) -> None:
    backend = FakeBackend(256)
    async with open_fake(backend) as engine:
        p = prompt(50)
        for n, cached in ((50, 0), (50, 49), (50, 49), (30, 29), (50, 49), (1, 0)):
            backend.pool.rows.clear()
            ids, _, finished = await run(engine, Request(p[:n], GREEDY, max_tokens=1))
            assert ids == reference(p[:n], 1)
            assert (finished.n_prompt, finished.n_cached) == (n, cached)
            assert sum(rows for rows, _ in backend.pool.rows) == n - cached


async def test_b11_counters_never_fall_and_a_cached_prompt_keeps_its_count(open_fake, autojump_clock) -> None:
    async with open_fake(FakeBackend(256)) as engine:
        _, _, first = await run(engine, Request(prompt(20), GREEDY, max_tokens=3))
        before = engine.stats()
        with engine.start(Request(prompt(30, 5), GREEDY)):
            await trio.lowlevel.checkpoint()
        _, _, second = await run(engine, Request(prompt(20), GREEDY, max_tokens=3))
        after = engine.stats()
        assert (first.n_prompt, first.n_cached) == (20, 0)
        assert (second.n_prompt, second.n_cached) == (20, 19)
        for name in ("prompt_tokens", "cached_tokens", "predicted_tokens", "n_decode_steps", "hits"):
            assert getattr(after, name) >= getattr(before, name)
        assert after.n_waiting == 0
        assert not any(lane.is_processing for lane in after.lanes)


async def test_b14_requests_start_in_order_of_arrival(open_fake, autojump_clock) -> None:
    backend = FakeBackend(256)
    async with open_fake(backend, n_parallel=1) as engine:
        started: dict[int, None] = {}

        def note_order(complete: Callable[[], None]) -> None:
            started.update(dict.fromkeys(seq.id for seq in engine._scheduler.in_flight()))  # ids count arrivals
            complete()

        backend.on_forward = note_order

        async def client(name: int) -> None:
            for i in range(20):
                await run(engine, Request(prompt(5, name * 100 + i), GREEDY, max_tokens=2))

        async with trio.open_nursery() as nursery:
            for name in range(3):
                nursery.start_soon(client, name)
        assert list(started) == list(range(60))


async def test_b15_a_queued_request_whose_client_left_is_never_run(open_fake, autojump_clock) -> None:
    backend = FakeBackend(512)
    held: list[Callable[[], None]] = []
    backend.on_forward = held.append
    async with open_fake(backend, n_parallel=1) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(run, engine, Request(prompt(10, 1), GREEDY, max_tokens=60))
        await wait_all_tasks_blocked()
        with engine.start(Request(prompt(100, 2), GREEDY, max_tokens=200)):
            await wait_all_tasks_blocked()
        assert len(held) == 1
        backend.on_forward = lambda complete: complete()
        held[0]()
        ids, _, _ = await run(engine, Request(prompt(10, 3), GREEDY, max_tokens=1))
        assert ids == reference(prompt(10, 3), 1)
        assert max(rows for rows, _ in backend.pool.rows) == 10, "the prompt of the client that left was evaluated"


async def test_b16_a_client_that_leaves_frees_its_row_within_one_step(open_fake, autojump_clock) -> None:
    backend = FakeBackend(1024)
    held: list[Callable[[], None]] = []
    backend.on_forward = held.append
    endless = SamplingParams(temperature=0, ignore_eos=True)

    async def step() -> None:
        await wait_all_tasks_blocked()
        held.pop()()
        await wait_all_tasks_blocked()

    async with open_fake(backend, n_parallel=2) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(run, engine, Request(prompt(9, 4), endless, max_tokens=12))
        with engine.start(Request(prompt(10), endless, max_tokens=900)) as leaver:
            for _ in range(4):
                await step()
            assert leaver.seq.n_predicted > 0
            assert len(held) == 1, "a step is in flight when the client leaves"
        assert sum(lane.is_processing for lane in engine.stats().lanes) == 1
        await step()
        backend.pool.rows.clear()
        await step()
        assert backend.pool.rows == [(1, True)], "the next step still had the row of the client that left"
        backend.on_forward = lambda complete: complete()
        held.pop()()


@pytest.mark.parametrize("n", [0, 1, 2, 3])
async def test_b18_small_limits_are_exact(open_fake, autojump_clock, n: int) -> None:
    async with open_fake(FakeBackend(64)) as engine:
        greedy = SamplingParams(temperature=0, ignore_eos=True)
        ids, text, finished = await run(engine, Request((5,), greedy, max_tokens=n))
        assert (len(ids), len(text), finished.n_predicted, finished.reason) == (n, n, n, "length")
        ids, _, _ = await run(engine, Request((5,), greedy, max_tokens=4))
        assert ids[:n] == reference((5,), n, ignore_eos=True)


async def test_b20_a_prompt_must_leave_room_for_one_token(open_fake, autojump_clock) -> None:
    async with open_fake(FakeBackend(64)) as engine:
        ids, _, finished = await run(engine, Request(prompt(63), GREEDY))
        assert (len(ids), finished.reason) == (1, "length" if ids[-1] else "stop")
        for n in (64, 65, 640):
            with pytest.raises(ContextOverflowError) as caught:
                engine.start(Request(prompt(n), GREEDY))
            assert (caught.value.n_prompt_tokens, caught.value.n_ctx, caught.value.status) == (n, 64, 400)
        _, _, finished = await run(engine, Request(prompt(63), GREEDY, max_tokens=1))
        assert finished.n_cached == 62, "a refused request disturbed what was cached"


@pytest.mark.parametrize("tokens", [(), (-1,), (64,), (1, 2**63)])
async def test_b49_token_ids_that_do_not_exist_are_refused(open_fake, autojump_clock, tokens) -> None:
    async with open_fake(FakeBackend(64)) as engine:
        with pytest.raises(RequestError) as caught:
            engine.start(Request(tokens, GREEDY))
        assert caught.value.field == "prompt"


async def test_b02_a_pinned_lane_finds_the_same_cache_as_any_other(open_fake, autojump_clock) -> None:
    results = []
    for lane in (1, None):
        async with open_fake(FakeBackend(100), n_parallel=2) as engine:
            await run(engine, Request(prompt(40, 1), GREEDY, max_tokens=5, lane=0))
            await run(engine, Request(prompt(60, 2), GREEDY, max_tokens=5, lane=0))
            ids, _, finished = await run(engine, Request(prompt(40, 1), GREEDY, max_tokens=5, lane=lane))
            assert finished.n_cached > 0
            assert lane is None or finished.lane == lane
            results.append((ids, finished.n_cached, finished.n_prompt))
    assert results[0] == results[1]
    assert results[0][0] == reference(prompt(40, 1), 5)


@with_and_without_staging
async def test_an_evicted_prefix_comes_back_from_the_host_and_gives_the_same_ids(
    open_fake, autojump_clock, needs_staging
) -> None:
    backend = FakeBackend(100, needs_staging=needs_staging)
    async with open_fake(backend, n_parallel=1, staging_mib=1) as engine:
        first, _, _ = await run(engine, Request(prompt(70, 1), GREEDY, max_tokens=4))
        await settled(engine)
        await run(engine, Request(prompt(90, 2), GREEDY, max_tokens=4))
        assert backend.n_scattered == 0
        again, _, finished = await run(engine, Request(prompt(70, 1), GREEDY, max_tokens=4))
        assert again == first == reference(prompt(70, 1), 4)
        assert finished.n_cached == 69
        assert backend.n_scattered >= 69
        stats = engine.stats()
        assert (stats.restores, stats.hits) == (1, 1)
        await settled(engine)


@with_and_without_staging
async def test_many_pages_come_back_in_their_order(open_fake, autojump_clock, needs_staging) -> None:
    backend = FakeBackend(400, needs_staging=needs_staging)
    async with open_fake(backend, n_parallel=1) as engine:
        first, _, _ = await run(engine, Request(prompt(350, 1), GREEDY, max_tokens=4))
        await settled(engine)
        await run(engine, Request(prompt(390, 2), GREEDY, max_tokens=4))
        await settled(engine)
        again, _, finished = await run(engine, Request(prompt(350, 1), GREEDY, max_tokens=4))
        assert again == first == reference(prompt(350, 1), 4)
        assert finished.n_cached == 349
        await settled(engine)


@with_and_without_staging
async def test_a_save_in_flight_never_holds_up_a_step(open_fake, autojump_clock, needs_staging) -> None:
    backend = FakeBackend(512, needs_staging=needs_staging)
    held: list[Callable[[], None]] = []
    async with open_fake(backend, n_parallel=2) as engine:
        backend.on_copy = held.append
        await run(engine, Request(prompt(50, 1), GREEDY, max_tokens=2))
        await wait_all_tasks_blocked()
        assert len(held) == 1
        assert engine.stats().cells_pinned > 0
        ids, _, _ = await run(engine, Request(prompt(50, 2), GREEDY, max_tokens=40))
        assert ids == reference(prompt(50, 2), 40), "a stream waited for a save"
        ids, _, finished = await run(engine, Request(prompt(50, 1), GREEDY, max_tokens=2))
        assert finished.n_cached == 49, "a newcomer waited for, or missed, what is still resident"
        assert engine.stats().cache_entries == 0, "an entry was visible before its copy was done"
        backend.on_copy = lambda complete: complete()
        for complete in held:
            complete()
        await settled(engine)
        assert engine.stats().cells_pinned == 0
        assert engine.stats().cache_entries > 0


@with_and_without_staging
async def test_a_save_that_fails_leaves_no_trace_and_the_server_goes_on(
    open_fake, autojump_clock, caplog, needs_staging
) -> None:
    backend = FakeBackend(100, needs_staging=needs_staging)
    async with open_fake(backend, n_parallel=1) as engine:
        backend.fail_next_copy = BackendError("out of pinned memory")
        await run(engine, Request(prompt(30), GREEDY, max_tokens=2))
        await settled(engine)
        stats = engine.stats()
        assert (stats.cache_bytes, stats.cache_entries, stats.cells_pinned) == (0, 0, 0)
        assert "out of pinned memory" in caplog.text
        ids, _, _ = await run(engine, Request(prompt(30), GREEDY, max_tokens=2))
        assert ids == reference(prompt(30), 2)


@with_and_without_staging
async def test_a_restore_that_fails_falls_back_to_evaluating(open_fake, autojump_clock, needs_staging) -> None:
    backend = FakeBackend(100, needs_staging=needs_staging)
    async with open_fake(backend, n_parallel=1) as engine:
        await run(engine, Request(prompt(70, 1), GREEDY, max_tokens=2))
        await settled(engine)
        await run(engine, Request(prompt(90, 2), GREEDY, max_tokens=2))
        await settled(engine)
        backend.fail_next_copy = BackendError("copy failed")
        ids, _, finished = await run(engine, Request(prompt(70, 1), GREEDY, max_tokens=2))
        assert ids == reference(prompt(70, 1), 2)
        assert finished.n_cached < 69
        await settled(engine)
        assert engine.stats().misses["failed_restore"] == 1


async def test_a_failed_step_ends_its_requests_and_nothing_else(open_fake, autojump_clock) -> None:
    backend = FakeBackend(256)
    async with open_fake(backend) as engine:
        backend.fail_next_forward = BackendError("launch failed")
        _, _, finished = await run(engine, Request(prompt(20), GREEDY, max_tokens=5))
        assert (finished.reason, finished.error) == ("error", "launch failed")
        ids, _, _ = await run(engine, Request(prompt(20), GREEDY, max_tokens=5))
        assert ids == reference(prompt(20), 5)
        await settled(engine)


async def test_a_bug_in_a_step_reaches_whoever_opened_the_engine(open_fake, autojump_clock) -> None:
    backend = FakeBackend(256)
    backend.fail_next_forward = ZeroDivisionError("a bug")
    with pytest.RaisesGroup(ZeroDivisionError, flatten_subgroups=True):
        async with open_fake(backend) as engine:
            await run(engine, Request(prompt(20), GREEDY, max_tokens=5))
    assert backend.is_closed


async def test_closing_ends_every_request_and_waits_for_the_step_in_flight(open_fake, autojump_clock) -> None:
    backend = FakeBackend(512)
    ends: list[Finished] = []
    async with trio.open_nursery() as nursery:
        async with open_fake(backend, n_parallel=1) as engine:

            async def client(salt: int) -> None:
                _, _, finished = await run(engine, Request(prompt(10, salt), SamplingParams(0.0, ignore_eos=True)))
                ends.append(finished)

            backend.on_forward = lambda complete: nursery.start_soon(later, complete)
            nursery.start_soon(client, 1)
            nursery.start_soon(client, 2)
            await trio.sleep(5.5)
        with pytest.raises(OverloadedError):
            engine.start(Request(prompt(3)))
    assert [end.reason for end in ends] == ["cancelled", "cancelled"]
    assert all("shutting down" in end.error for end in ends)


async def later(complete: Callable[[], None]) -> None:
    await trio.sleep(1)
    complete()


async def test_a_reader_that_stalls_pauses_only_itself_and_is_cancelled_in_the_end(open_fake, autojump_clock) -> None:
    backend = FakeBackend(2000)
    endless = SamplingParams(temperature=0, ignore_eos=True)
    async with open_fake(backend, n_parallel=2, n_ctx=0, stream_stall_timeout=60.0) as engine:
        with engine.start(Request(prompt(5), endless, max_tokens=1500)) as stalled:
            ids, _, _ = await run(engine, Request(prompt(5, 2), endless, max_tokens=500))
            assert ids == reference(prompt(5, 2), 500, ignore_eos=True)
            assert stalled.seq.n_predicted <= MAX_BEHIND + 1
            await trio.sleep(61)
            assert stalled.seq.finish_reason == "cancelled"
            last = [event async for event in stalled][-1]
            assert isinstance(last, Finished)
            assert "nothing was read" in last.error
            assert not any(lane.is_processing for lane in engine.stats().lanes)


async def test_a_reader_that_catches_up_gets_every_token(open_fake, autojump_clock) -> None:
    async with open_fake(FakeBackend(2000)) as engine:
        endless = SamplingParams(temperature=0, ignore_eos=True)
        with engine.start(Request(prompt(5), endless, max_tokens=300)) as slow:
            ids: list[int] = []
            async for event in slow:
                await trio.sleep(0.5)
                if not isinstance(event, Finished):
                    ids += event.ids
        assert ids == reference(prompt(5), 300, ignore_eos=True)


async def test_a_stop_string_over_token_borders_is_cut_and_never_shown(open_fake, autojump_clock) -> None:
    async with open_fake(FakeBackend(256)) as engine:
        greedy = SamplingParams(temperature=0, ignore_eos=True)
        _, whole, _ = await run(engine, Request(prompt(8), greedy, max_tokens=20))
        stop = whole[7:10]
        _, text, finished = await run(engine, Request(prompt(8), greedy, max_tokens=20, stop=("~~", stop)))
        assert text == whole[: whole.index(stop)]
        assert (finished.reason, finished.stopping_word) == ("word", stop)


async def test_a_sequence_resumes_with_the_same_ids_after_it_had_to_make_room(open_fake, autojump_clock) -> None:
    backend = FakeBackend(150)
    greedy = SamplingParams(temperature=0, ignore_eos=True)
    async with open_fake(backend, n_parallel=4) as engine:
        results: dict[int, tuple[list[int], str, Finished]] = {}

        async def one(salt: int) -> None:
            results[salt] = await run(engine, Request(prompt(30, salt), greedy, max_tokens=40))

        async with trio.open_nursery() as nursery:
            for salt in range(4):
                nursery.start_soon(one, salt)
        assert engine.stats().n_preempted > 0
        for salt, (ids, _, finished) in results.items():
            assert ids == reference(prompt(30, salt), 40, ignore_eos=True), f"stream {salt}"
            assert finished.reason == "length"


SEEDED: dict[str, list[int]] = {}


@pytest.mark.parametrize("company", [0, 3])
async def test_a_seed_gives_the_same_ids_alone_and_in_company(open_fake, autojump_clock, company: int) -> None:
    async with open_fake(FakeBackend(1024), n_parallel=4) as engine, trio.open_nursery() as nursery:
        for i in range(company):
            nursery.start_soon(run, engine, Request(prompt(12, 50 + i), SamplingParams(seed=i), max_tokens=50))
        ids, _, finished = await run(engine, Request(prompt(12), SamplingParams(1.5, seed=7), max_tokens=25))
        assert finished.seed == 7
        assert ids == SEEDED.setdefault("ids", ids)


async def test_generate_yields_text_and_refuses_options_that_do_not_exist(open_fake, autojump_clock) -> None:
    async with open_fake(FakeBackend(64)) as engine:
        text = "".join([piece async for piece in engine.generate("ABC", max_tokens=5, temperature=0, ignore_eos=True)])
        assert len(text) == 5
        with pytest.raises(ValueError, match=r"max_token$"):
            engine.request("ABC", max_token=5)
        with pytest.raises(LlamatrioError):
            engine.start(engine.request("ABC", lane=9))


async def test_an_engine_option_that_does_not_exist_is_named(open_fake, autojump_clock) -> None:
    with pytest.raises(ValueError, match="'n_ctxx'"):
        async with open_fake(FakeBackend(64), n_ctxx=5):
            pass


async def test_clients_of_other_scopes_share_nothing(open_fake, autojump_clock) -> None:
    async with open_fake(FakeBackend(256)) as engine:
        await run(engine, Request(prompt(20), GREEDY, max_tokens=1, scope="a"))
        _, _, other = await run(engine, Request(prompt(20), GREEDY, max_tokens=1, scope="b"))
        _, _, same = await run(engine, Request(prompt(20), GREEDY, max_tokens=1, scope="a"))
        assert (other.n_cached, same.n_cached) == (0, 19)
        assert engine.stats().misses == {"no_entry": 1, "other_scope": 1}


async def test_tokens_are_diverted_only_while_their_reader_waits_and_keep_their_order(
    open_fake, autojump_clock
) -> None:
    async with open_fake(FakeBackend(2000)) as engine:
        endless = SamplingParams(temperature=0, ignore_eos=True)
        got: list[tuple[str, int]] = []

        def take(event: TokenEvent, now: float) -> TokenEvent | None:
            assert now == trio.current_time()
            if len(got) % 7 == 6:
                return event  # this one is for the reader
            got.extend(("direct", id) for id in event.ids)
            return None

        with engine.start(Request(prompt(5), endless, max_tokens=200)) as generation:
            generation.divert(take)
            async for event in generation:
                if isinstance(event, Finished):
                    break
                got.extend(("reader", id) for id in event.ids)
                if len(got) > 100:
                    await trio.sleep(0.3)
        assert [id for _, id in got] == reference(prompt(5), 200, ignore_eos=True)
        assert {way for way, _ in got} == {"direct", "reader"}


@pytest.mark.parametrize("takes_every_core", [True, False])
async def test_tokens_go_out_before_a_step_that_leaves_no_core_and_during_one_that_does(
    open_fake, autojump_clock, takes_every_core
) -> None:
    backend = FakeBackend(512, takes_every_core=takes_every_core)
    seen: list[int] = []
    """Tokens that had gone out when each step began."""
    sent: list[int] = []

    def forward(complete: Callable[[], None]) -> None:
        seen.append(len(sent))
        trio.lowlevel.current_trio_token().run_sync_soon(complete)

    def take(event: TokenEvent, now: float) -> None:
        sent.extend(event.ids)

    backend.on_forward = forward
    async with open_fake(backend) as engine:
        endless = SamplingParams(temperature=0, ignore_eos=True)
        with engine.start(Request(prompt(5), endless, max_tokens=10)) as generation:
            generation.divert(take)
            async for _ in generation:
                pass
        assert len(sent) == 10
        assert seen == [max(0, step if takes_every_core else step - 1) for step in range(10)]


async def test_a_stop_string_ends_a_stream_before_another_step_where_tokens_go_out_first(
    open_fake, autojump_clock
) -> None:
    backend = FakeBackend(512, takes_every_core=True)
    async with open_fake(backend) as engine:
        ids = reference(prompt(5), 10, ignore_eos=True)
        word = bytes([40 + ids[3]]).decode()
        n_steps = ids.index(ids[3]) + 1
        endless = SamplingParams(temperature=0, ignore_eos=True)
        _, _, finished = await run(engine, Request(prompt(5), endless, max_tokens=10, stop=(word,)))
        assert (finished.reason, finished.stopping_word) == ("word", word)
        assert len(backend.pool.rows) == n_steps


async def test_a_take_that_fails_loses_no_token_and_harms_nobody(open_fake, autojump_clock, caplog) -> None:
    async with open_fake(FakeBackend(2000)) as engine:
        ids: list[int] = []

        def take(event: TokenEvent, now: float) -> TokenEvent | None:
            raise RuntimeError("a mistake in the server")

        with engine.start(Request(prompt(5), GREEDY, max_tokens=20)) as generation:
            generation.divert(take)
            async for event in generation:
                ids += () if isinstance(event, Finished) else event.ids
        assert ids == reference(prompt(5), 20)
        assert "a mistake in the server" in caplog.text


async def test_only_one_task_reads_a_generation(open_fake, autojump_clock) -> None:
    async with open_fake(FakeBackend(2000)) as engine:
        with engine.start(Request(prompt(5), GREEDY, max_tokens=20)) as generation:
            outcomes: list[str] = []

            async def read() -> None:
                try:
                    await generation.__anext__()
                    outcomes.append("event")
                except trio.BusyResourceError:
                    outcomes.append("busy")

            async with trio.open_nursery() as nursery:
                for _ in range(2):
                    nursery.start_soon(read)
            assert sorted(outcomes) == ["busy", "event"]
        with pytest.raises(trio.ClosedResourceError):
            await generation.__anext__()


@pytest.mark.parametrize("rows", [{"n_ubatch": 1}, {"n_batch": 1}, {"n_batch": 64, "n_ubatch": 64}])
async def test_small_batches_let_every_prompt_start(open_fake, autojump_clock, rows: dict[str, int]) -> None:
    """Prompts are cut at multiples of 64: a step has room for that many beside all streams, whatever was asked for."""
    async with open_fake(FakeBackend(1024), n_parallel=2, **rows) as engine:
        long = Request(prompt(20), SamplingParams(temperature=0.0, ignore_eos=True), max_tokens=300)
        with engine.start(long) as running:
            await anext(aiter(running))
            ids, _, _ = await run(engine, Request(prompt(130, 5), GREEDY, max_tokens=3))
            assert ids == reference(prompt(130, 5), 3)
            assert engine._scheduler.running, "the newcomer waited for the stream to end"


async def test_a_request_with_an_empty_stop_string_leaves_nothing_behind(open_fake, autojump_clock) -> None:
    async with open_fake(FakeBackend(256)) as engine:
        ids, _, _ = await run(engine, Request(prompt(5), GREEDY, max_tokens=4, stop=("",)))
        assert ids == reference(prompt(5), 4)
        assert not engine._scheduler.running


async def test_saves_take_turns_and_closing_begins_none(open_fake, autojump_clock) -> None:
    backend = FakeBackend(256, needs_staging=False)
    held: list[Callable[[], None]] = []
    backend.on_copy = held.append
    async with open_fake(backend, n_parallel=4) as engine:
        async with trio.open_nursery() as nursery:
            for salt in range(3):
                nursery.start_soon(run, engine, Request(prompt(9, salt), GREEDY, max_tokens=2))
        await wait_all_tasks_blocked()
        assert len(held) == 1, "saves were under way at the same time"
        for n in range(1, 4):
            held[n - 1]()
            await wait_all_tasks_blocked()
            assert len(held) == min(n + 1, 3)
        assert engine._cache.counters.saves == 3
        backend.on_copy = None
        started = engine.start(Request(prompt(9, 7), GREEDY, max_tokens=-1))
        await anext(aiter(started))
    assert engine._cache.counters.saves == 3


async def run_together(engine: Engine, requests: list[Request]) -> list[tuple[list[int], Finished]]:
    """Starts them in this order before any step."""
    results: dict[int, tuple[list[int], Finished]] = {}

    async def one(i: int, generation: Generation) -> None:
        with generation:
            ids: list[int] = []
            async for event in generation:
                if isinstance(event, Finished):
                    results[i] = ids, event
                else:
                    ids += event.ids

    async with trio.open_nursery() as nursery:
        for i, request in enumerate(requests):
            nursery.start_soon(one, i, engine.start(request))
    await settled(engine)
    return [results[i] for i in range(len(requests))]


async def test_prompts_that_arrive_together_evaluate_what_they_share_once(open_fake, autojump_clock) -> None:
    backend = FakeBackend(2048)
    async with open_fake(backend, n_parallel=4, n_ubatch=64) as engine:
        system = prompt(150)
        prompts = [(*system, *prompt(n, salt)) for salt, n in enumerate((10, 70, 3, 20))]
        results = await run_together(engine, [Request(p, GREEDY, max_tokens=4) for p in prompts])
        assert [finished.n_cached for _, finished in results] == [0, 150, 150, 150]
        assert [ids for ids, _ in results] == [reference(p, 4) for p in prompts]
        assert sum(n for n, is_decode in backend.pool.rows if not is_decode) == 150 + sum((10, 70, 3, 20))
        assert engine.stats().hits == 3


@pytest.mark.parametrize(
    "second",
    [
        Request(prompt(150), GREEDY, max_tokens=4, cache_prompt=False),
        Request(prompt(150), GREEDY, max_tokens=4, scope="other"),
        Request((*prompt(63), 1, 2, *prompt(85, 3)), GREEDY, max_tokens=4),  # too little to wait for
    ],
    ids=["without cache", "other scope", "other prompt"],
)
async def test_prompts_that_may_not_share_or_hardly_do_wait_for_nobody(open_fake, autojump_clock, second) -> None:
    backend = FakeBackend(2048)
    async with open_fake(backend, n_parallel=4, n_ubatch=400) as engine:
        results = await run_together(engine, [Request(prompt(150), GREEDY, max_tokens=4), second])
        assert backend.pool.rows[:2] == [(150, False), (150, False)]  # one step
        assert [ids for ids, _ in results] == [reference(prompt(150), 4), reference(second.tokens, 4)]


async def test_followers_take_what_a_leader_that_goes_leaves(open_fake, autojump_clock) -> None:
    backend = FakeBackend(2048)
    async with open_fake(backend, n_parallel=4, n_ubatch=64) as engine:
        leader = engine.start(Request(prompt(190), GREEDY))

        def leave_after_a_piece(complete: Callable[[], None]) -> None:
            complete()
            leader.__exit__(None, None, None)

        backend.on_forward = leave_after_a_piece
        results = await run_together(engine, [Request(prompt(190), GREEDY, max_tokens=4)] * 2)
        assert [finished.n_cached for _, finished in results] == [64, 189]
        assert [ids for ids, _ in results] == [reference(prompt(190), 4)] * 2


async def test_what_cannot_be_chosen_ends_its_request_and_no_other(open_fake, autojump_clock) -> None:
    """A row of NaN, as a damaged weight or an overflow makes them."""
    backend = FakeBackend(256)
    step = backend.pool.step

    def spoiled(batch: Batch) -> StepOutput:
        output = step(batch)
        if len(output.logits) > 1:
            output.logits[0] = math.nan
        return output

    backend.pool.step = spoiled
    async with open_fake(backend, n_parallel=2) as engine:
        results = {}

        async def one(salt: int, params: SamplingParams) -> None:
            results[salt] = await run(engine, Request(prompt(20, salt), params, max_tokens=9))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one, 1, GREEDY)
            nursery.start_soon(one, 2, GREEDY)
        assert sorted(results[salt][2].reason for salt in (1, 2)) == ["error", "length"]
        hurt, fine = sorted((1, 2), key=lambda salt: results[salt][2].reason != "error")
        assert "no token may follow" in results[hurt][2].error
        assert results[fine][0] == reference(prompt(20, fine), 9)
        await settled(engine)


async def test_a_request_that_bans_every_token_is_refused_by_name(open_fake, autojump_clock) -> None:
    all_but_eog = tuple((token, -math.inf) for token in range(1, N_VOCAB))
    async with open_fake(FakeBackend(256)) as engine:
        for params in (
            SamplingParams(logit_bias=((0, -math.inf), *all_but_eog)),
            SamplingParams(logit_bias=all_but_eog, ignore_eos=True),
            SamplingParams(logit_bias=all_but_eog, min_tokens=1),
        ):
            with pytest.raises(RequestError, match="banned") as caught:
                engine.start(Request((1, 2), params))
            assert caught.value.field == "logit_bias"
        ids, _, finished = await run(engine, Request((1, 2), SamplingParams(logit_bias=all_but_eog)))
        assert (ids, finished.reason) == ([0], "stop")


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_k=70),
        SamplingParams(top_k=5, n_probs=256),
        SamplingParams(0.0, n_probs=1000),
        SamplingParams(0.0, repeat_penalty=1.1, repeat_last_n=-1),
        SamplingParams(top_k=50, logit_bias=tuple((token, -1.0) for token in range(40))),
        SamplingParams(top_k=0, n_probs=100),
    ],
)
async def test_a_vocabulary_smaller_than_what_is_asked_for(params: SamplingParams, open_fake, autojump_clock) -> None:
    async with open_fake(FakeBackend(256)) as engine:
        with engine.start(Request(tuple(range(1, 60)), replace(params, ignore_eos=True), max_tokens=3)) as generation:
            events = [event async for event in generation]
        assert events[-1].reason == "length"
        assert all(len(e.probs[0].top) == N_VOCAB for e in events[:-1] if params.n_probs >= N_VOCAB)
        await settled(engine)


async def test_stop_strings_over_the_limit_are_refused_by_name(open_fake, autojump_clock) -> None:
    async with open_fake(FakeBackend(256)) as engine:
        for stop in (("a" * (MAX_STOP + 1),), ("ab",) * (MAX_STOP // 2) + ("c",)):
            with pytest.raises(RequestError, match="8192") as caught:
                engine.start(Request((1, 2), GREEDY, stop=stop))
            assert caught.value.field == "stop"
        assert not engine.stats().n_waiting
        await run(engine, Request((1, 2), GREEDY, max_tokens=1, stop=("ab",) * (MAX_STOP // 2)))


async def test_a_reader_that_waits_learns_that_its_generation_was_left(open_fake, autojump_clock) -> None:
    """Another task may close what this one reads: it must not wait for events that never come."""
    backend = FakeBackend(256)
    held: list[Callable[[], None]] = []
    backend.on_forward = held.append
    async with open_fake(backend) as engine:
        generation = engine.start(Request(prompt(20), GREEDY))
        with trio.fail_after(5):
            async with trio.open_nursery() as nursery:

                @nursery.start_soon
                async def read() -> None:
                    with pytest.raises(trio.ClosedResourceError):
                        await generation.__anext__()

                await wait_all_tasks_blocked()
                generation.__exit__(None, None, None)
        generation.__exit__(None, None, None)
        with pytest.raises(trio.ClosedResourceError):
            await generation.__anext__()
        held.pop()()
        await settled(engine)


async def test_a_reader_whose_event_came_in_the_same_moment_as_the_end_learns_of_the_end(
    open_fake, autojump_clock
) -> None:
    async with open_fake(FakeBackend(256)) as engine:
        generation = engine.start(Request(prompt(20), GREEDY))
        put = generation.put

        def put_and_leave(choice: Choice, piece: bytes, now: float) -> str | None:
            stopped = put(choice, piece, now)
            generation.__exit__(None, None, None)
            return stopped

        generation.put = put_and_leave
        with trio.fail_after(5), pytest.raises(trio.ClosedResourceError):
            await generation.__anext__()
        await settled(engine)


async def test_what_fails_before_a_request_is_queued_leaves_nothing_behind(
    open_fake, autojump_clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_fake(FakeBackend(256)) as engine:
        bad: Any = (5,)
        for request in (Request((1, 2), GREEDY, stop=bad), Request((1, 2), SamplingParams(seed=1), stop=bad)):
            with pytest.raises(TypeError):
                engine.start(request)
        monkeypatch.setattr("llamatrio.engine.engine.TextAssembler", lambda stop: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.start(Request((1, 2), GREEDY))
        monkeypatch.undo()
        assert engine.stats().n_waiting == 0
        await settled(engine)
        assert not engine._decoder.generations
        await run(engine, Request((1, 2), GREEDY, max_tokens=1))


async def test_a_model_whose_context_is_no_context_is_refused(open_fake, autojump_clock) -> None:
    for n_cells, options in ((1, {}), (7, {"n_parallel": 4, "kv_unified": False})):
        backend = FakeBackend(n_cells)
        with pytest.raises(ValueError, match="expected a context of 2 tokens"):
            async with open_fake(backend, **options):
                pass
        assert backend.is_closed


async def test_a_batch_that_is_raised_says_so(open_fake, autojump_clock, caplog: pytest.LogCaptureFixture) -> None:
    async with open_fake(FakeBackend(256), n_batch=8, n_ubatch=4, n_parallel=4) as engine:
        assert (await run(engine, Request(prompt(100), GREEDY, max_tokens=1)))[0] == reference(prompt(100), 1)
    assert [r.getMessage().split(" is")[0] for r in caplog.records] == ["n_batch 8", "n_ubatch 4"]
    assert "68 is used" in caplog.text
    caplog.clear()
    async with open_fake(FakeBackend(256), n_batch=68, n_ubatch=64, n_parallel=4):
        assert not caplog.records
