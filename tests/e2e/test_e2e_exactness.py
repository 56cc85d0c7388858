"""A sequence's logits are the same bits whatever happened to its cells, and whoever ran beside it.

FULL reports the log probability of every token at every position, so equal reports mean equal logits. Borders of
prompt pieces are the same in both runs of each pair: a prompt is cut where its cached part ends and at multiples of
64 positions, and a restored prefix is as long as a resident one.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import trio
import trio.testing
from e2e_tools import (
    FULL,
    GREEDY,
    MODEL,
    MODELS,
    Outcome,
    n_before_a_close_choice,
    open_tiny,
    prompt,
    run,
    run_all,
    settled,
)

from llamatrio.backends.cpu import weights
from llamatrio.engine.engine import Engine
from llamatrio.sched.types import SamplingParams

KV_TYPES = [("f16", "f16"), ("q8_0", "q8_0"), ("q8_0", "f16"), ("f16", "q8_0")]
WIDE, WINDOWED = MODELS / "tiny-qwen3-wide-q4_k_m.gguf", MODELS / "tiny-gemma3-f16.gguf"
CLEAR = [prompt(40, seed) for seed in (83, 87, 88)]
"""Prompts after which every choice is clear."""
SAMPLED = SamplingParams(temperature=0.9, seed=7, ignore_eos=True, n_probs=5)


def assert_same(one: Outcome, other: Outcome) -> None:
    assert one.ids == other.ids
    assert one.text == other.text
    assert one.probs == other.probs, "the ids are the same, the logits are not"


def kv(types: tuple[str, str]) -> dict[str, Any]:
    return {"type_k": types[0], "type_v": types[1]}


async def company(engine: Engine, n: int) -> None:
    """n streams with prompts of their own, whose prompts and outputs are of every length."""
    async with trio.open_nursery() as nursery:
        for i in range(n):
            nursery.start_soon(run, engine, prompt(11 + 37 * i, 100 + i), 15 + 20 * i)


# ---------------------------------------------------------------- restore


async def two_turns(engine: Engine, between: tuple[int, ...] = ()) -> tuple[Outcome, Outcome]:
    """A prompt and a continuation; then both with more behind them. In between, prompts of other clients."""
    first = await run(engine, prompt(100), 21, FULL)
    await settled(engine)
    for seed in between:
        await run(engine, prompt(150, seed), 5)
        await settled(engine)
    second = await run(engine, (*prompt(100), *first.ids, *prompt(30, 9)), 21, FULL)
    return first, second


@pytest.mark.parametrize("types", KV_TYPES, ids="-".join)
@pytest.mark.parametrize("model", [MODEL, WIDE, WINDOWED], ids=lambda path: path.stem)
async def test_a_restored_prefix_continues_with_the_same_bits(model: Any, types: tuple[str, str]) -> None:
    async with open_tiny(model, n_ctx=2048, **kv(types)) as engine:
        expected = await two_turns(engine)
        assert engine.stats().restores == 0
    async with open_tiny(model, n_ctx=256, staging_mib=1, **kv(types)) as engine:
        restored = await two_turns(engine, between=(1, 2, 3))
        stats = engine.stats()
        assert stats.restores == 1
        assert stats.restore_bytes == 120 * engine._backend.layout.record_bytes
        await settled(engine)
    for one, other in zip(expected, restored, strict=True):
        assert one.finished.n_cached == other.finished.n_cached
        assert_same(one, other)
    assert restored[1].finished.n_cached == 120  # the last token of the first turn was never fed


async def test_restores_beside_running_streams_are_exact() -> None:
    async with open_tiny(n_ctx=2048) as engine:
        expected = await two_turns(engine)
    async with open_tiny(n_ctx=400, n_parallel=4) as engine:
        first = await run(engine, prompt(100), 21, FULL)
        for seed in (1, 2):
            await run(engine, prompt(190, seed), 2)
        await settled(engine)
        assert engine.stats().restores == 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, engine, prompt(20, 5), 120)
            nursery.start_soon(run, engine, prompt(30, 6), 90)
            second = await run(engine, (*prompt(100), *first.ids, *prompt(30, 9)), 21, FULL)
        assert engine.stats().restores == 1
    assert_same(expected[1], second)


async def test_a_prefix_of_several_staging_buffers_comes_back_exactly() -> None:
    turns = (prompt(900), (*prompt(900), *prompt(40, 1)))
    async with open_tiny(WINDOWED, n_ctx=4096) as engine:
        expected = [await run(engine, tokens, 5, FULL) for tokens in turns]
    async with open_tiny(WINDOWED, n_ctx=1024, staging_mib=1) as engine:
        found = [await run(engine, turns[0], 5, FULL)]
        await settled(engine)
        await run(engine, prompt(950, 2), 2)
        found.append(await run(engine, turns[1], 5, FULL))
        assert engine.stats().restore_bytes == 900 * engine._backend.layout.record_bytes > 1 << 20
    for one, other in zip(expected, found, strict=True):
        assert_same(one, other)


async def test_a_conversation_saves_only_its_new_tokens() -> None:
    async with open_tiny(n_ctx=1024) as engine:
        record = engine._backend.layout.record_bytes
        history: tuple[int, ...] = ()
        n_saved = 0
        for turn in range(4):
            history += prompt(40 + 7 * turn, turn)
            answer = await run(engine, history, 12, GREEDY)
            assert answer.finished.n_cached == n_saved
            history += tuple(answer.ids)
            await settled(engine)
            n_saved = len(history) - 1
            assert engine.stats().save_bytes == n_saved * record, "tokens of earlier turns were saved again"
        assert engine.stats().saves == 4
        assert engine.stats().cache_bytes == n_saved * record


# ---------------------------------------------------------------- company, lanes, threads


@pytest.mark.parametrize("types", KV_TYPES, ids="-".join)
@pytest.mark.parametrize("model", [MODEL, WIDE, WINDOWED], ids=lambda path: path.stem)
async def test_company_changes_no_bit(model: Any, types: tuple[str, str]) -> None:
    async with open_tiny(model, n_ctx=2048, n_parallel=8, **kv(types)) as engine:
        alone = await run(engine, prompt(150), 25, FULL, cache_prompt=False)
        steps = engine.stats().n_decode_steps
        async with trio.open_nursery() as nursery:
            nursery.start_soon(company, engine, 6)
            await trio.testing.wait_all_tasks_blocked()
            among = await run(engine, prompt(150), 25, FULL, cache_prompt=False)
        predicted = 25 + sum(15 + 20 * i for i in range(6))
        assert engine.stats().n_decode_steps - steps < predicted, "nobody shared a step"
    assert_same(alone, among)


async def test_a_seed_draws_the_same_tokens_in_company_and_after_a_restore() -> None:
    async with open_tiny(n_ctx=2048, n_parallel=8) as engine:
        alone = await run(engine, prompt(60), 40, SAMPLED, cache_prompt=False)
        other = await run(engine, prompt(60), 40, replace(SAMPLED, seed=8), cache_prompt=False)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(company, engine, 5)
            among = await run(engine, prompt(60), 40, SAMPLED, cache_prompt=False)
    assert alone.ids != other.ids
    assert_same(alone, among)


async def test_lanes_change_no_bit() -> None:
    async with open_tiny(n_ctx=1024, n_parallel=4, type_k="q8_0", type_v="q8_0") as engine:
        outcomes = [await run(engine, prompt(70), 12, FULL, cache_prompt=False, lane=lane) for lane in range(4)]
    assert [outcome.finished.lane for outcome in outcomes] == [0, 1, 2, 3]
    for outcome in outcomes[1:]:
        assert_same(outcomes[0], outcome)


@pytest.mark.parametrize("model", [MODEL, WIDE, WINDOWED], ids=lambda path: path.stem)
async def test_the_number_of_threads_changes_no_bit(model: Any) -> None:
    outcomes = []
    for n_threads in (1, 2):
        async with open_tiny(model, n_ctx=512, n_threads=n_threads, type_k="q8_0", type_v="q8_0") as engine:
            assert f"{n_threads} threads" in engine.device
            outcomes.append(await run(engine, prompt(130), 20, FULL))
    assert_same(*outcomes)


# ---------------------------------------------------------------- preemption


@pytest.mark.parametrize("types", KV_TYPES[:2], ids="-".join)
async def test_a_preempted_stream_resumes_with_the_same_bits(types: tuple[str, str]) -> None:
    async with open_tiny(n_ctx=1024, n_parallel=3, **kv(types)) as engine:
        expected = await run_all(engine, CLEAR, 60, FULL)
        assert engine.stats().n_preempted == 0
    async with open_tiny(n_ctx=192, n_parallel=3, **kv(types)) as engine:
        found = await run_all(engine, CLEAR, 60, FULL)
        assert engine.stats().n_preempted > 0
        await settled(engine)
    for one, other in zip(expected, found, strict=True):
        assert_same(one, other)


async def test_a_preempted_stream_resumes_with_the_same_ids_when_the_cache_is_off() -> None:
    """Its own tokens are then evaluated again, as a prompt: the numbers are close, not equal."""
    async with open_tiny(n_ctx=1024, n_parallel=3) as engine:
        expected = await run_all(engine, CLEAR, 60, replace(GREEDY, n_probs=2))
    async with open_tiny(n_ctx=192, n_parallel=3, cache_ram_mib=0) as engine:
        found = await run_all(engine, CLEAR, 60)
        assert engine.stats().n_preempted > 0
        assert engine.stats().saves == 0
    n_clear = [n_before_a_close_choice(outcome) for outcome in expected]
    for one, other, n in zip(expected, found, n_clear, strict=True):
        assert one.ids[:n] == other.ids[:n]
    assert sum(n_clear) > 120, "too few choices were clear for this to mean anything"


async def test_asking_for_probabilities_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody asks, most of the head is not read."""
    monkeypatch.setattr(weights, "LEAST_SHARE", 0.0)
    async with open_tiny(MODELS / "tiny-qwen3-wide-q8_0.gguf", n_ctx=1024, n_parallel=3) as engine:
        silent = await run_all(engine, CLEAR, 40, replace(SAMPLED, n_probs=0))
        asked = await run_all(engine, CLEAR, 40, SAMPLED)
    for one, other in zip(silent, asked, strict=True):
        assert one.ids == other.ids
        assert all(math.isfinite(choice.logprob) for choice in other.probs)
        assert len(other.probs) == 40
