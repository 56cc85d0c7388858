"""The prompt cache's budget with real records: never exceeded, 0 is off, -1 has no limit.

A token of the tiny model is a record of 1,536 bytes, so 1 MiB holds 682 of them: three prompts of 200.
"""

from __future__ import annotations

import pytest
import trio
from e2e_tools import open_tiny, prompt, run, run_all, settled

from llamatrio.engine.engine import Engine

MIB = 1 << 20


async def watch(engine: Engine, *, task_status: trio.TaskStatus[trio.CancelScope]) -> None:
    """Asserts all the time that the budget holds, by the books and by the bytes themselves."""
    with trio.CancelScope() as scope:
        task_status.started(scope)
        while True:
            stats = engine.stats()
            assert stats.cache_limit_bytes is not None
            assert stats.cache_bytes <= stats.cache_limit_bytes
            assert held_bytes(engine) <= stats.cache_bytes
            await trio.sleep(0.0005)  # the device needs the GIL too


def held_bytes(engine: Engine) -> int:
    """Bytes of the pages that the cache's entries refer to."""
    pages = {id(s.page): s.page for node in engine._cache.nodes() if node.records for s in node.records.slices}
    return sum(page.nbytes for page in pages.values())


async def test_a_small_budget_is_never_exceeded_and_the_oldest_makes_room() -> None:
    async with open_tiny(n_ctx=640, n_parallel=4, cache_ram_mib=1) as engine, trio.open_nursery() as nursery:
        scope = await nursery.start(watch, engine)
        await run_all(engine, [prompt(200, seed) for seed in range(8)], 9)
        await settled(engine)
        stats, record = engine.stats(), engine._backend.layout.record_bytes
        assert stats.cache_limit_bytes == MIB
        assert stats.save_bytes > MIB > stats.cache_bytes > MIB - 209 * record
        assert stats.cache_bytes == held_bytes(engine)
        await run(engine, prompt(200, 100), 1)
        await run(engine, prompt(200, 101), 1)
        await settled(engine)
        before = engine.stats()
        assert (await run(engine, prompt(200, 101), 1)).finished.n_cached == 199
        assert (await run(engine, prompt(200, 0), 1)).finished.n_cached == 0
        after = engine.stats()
        assert (after.hits - before.hits, after.misses.get("evicted", 0) - before.misses.get("evicted", 0)) == (1, 1)
        scope.cancel()


async def test_the_budget_holds_while_saves_are_under_way_and_records_come_back() -> None:
    """Conversations that go on in turn: restores lock entries while other saves want their room."""
    async with open_tiny(n_ctx=400, n_parallel=2, cache_ram_mib=1, staging_mib=1) as engine:
        async with trio.open_nursery() as nursery:
            scope = await nursery.start(watch, engine)
            histories = [prompt(70, seed) for seed in range(5)]
            for turn in range(3):
                for i, history in enumerate(histories):
                    answer = await run(engine, history, 8)
                    histories[i] = (*history, *answer.ids, *prompt(30, 50 + turn))
            scope.cancel()
        await settled(engine)
        assert engine.stats().restores > 0
        assert engine.stats().save_bytes > MIB


async def test_a_prompt_larger_than_the_budget_is_served_and_not_kept() -> None:
    async with open_tiny(n_ctx=1024, n_parallel=2, cache_ram_mib=1) as engine, trio.open_nursery() as nursery:
        scope = await nursery.start(watch, engine)
        expected = await run(engine, prompt(800), 20)
        await settled(engine)
        assert (engine.stats().saves, engine.stats().cache_bytes) == (0, 0)
        assert (await run(engine, prompt(800), 1)).finished.n_cached == 799, "it is still in the cells"
        await run(engine, prompt(900, 1), 1)
        again = await run(engine, prompt(800), 20)
        assert again.finished.n_cached == 0
        assert again.ids == expected.ids
        scope.cancel()


async def test_a_budget_of_0_keeps_nothing() -> None:
    async with open_tiny(n_ctx=512, n_parallel=2, cache_ram_mib=0) as engine, trio.open_nursery() as nursery:
        scope = await nursery.start(watch, engine)
        await run_all(engine, [prompt(200, seed) for seed in range(4)], 9)
        assert (await run(engine, prompt(200, 0), 1)).finished.n_cached == 0
        stats = engine.stats()
        assert (stats.saves, stats.save_bytes, stats.cache_bytes, stats.cache_entries) == (0, 0, 0, 0)
        assert (stats.cache_limit_bytes, stats.restores) == (0, 0)
        assert stats.misses["disabled"] == 5
        scope.cancel()


async def test_a_budget_of_minus_1_keeps_everything() -> None:
    async with open_tiny(n_ctx=512, n_parallel=2, cache_ram_mib=-1) as engine:
        await run_all(engine, [prompt(200, seed) for seed in range(8)], 9)
        await settled(engine)
        record = engine._backend.layout.record_bytes
        assert engine.stats().cache_limit_bytes is None
        assert engine.stats().cache_bytes == held_bytes(engine) == 8 * 208 * record > 2 * MIB
        for seed in range(8):
            assert (await run(engine, prompt(200, seed), 1)).finished.n_cached == 199
        assert engine.stats().misses == {"no_entry": 8}


@pytest.mark.parametrize("is_on", [True, False])
async def test_idle_slots_are_saved_at_once_only_when_wanted(is_on: bool) -> None:
    async with open_tiny(n_ctx=512, n_parallel=2, cache_idle_slots=is_on) as engine:
        await run(engine, prompt(100), 5)
        await settled(engine)
        assert engine.stats().saves == (1 if is_on else 0)
        for seed in (1, 2, 3):
            await run(engine, prompt(200, seed), 5)
        assert (await run(engine, prompt(100), 1)).finished.n_cached == 99
        assert engine.stats().restores == 1, "what needed room was not saved before it was dropped"
