"""Cases of the cache and of slots over HTTP, on the real engine: B02 B08 B10 B11 B14 B15 B16 B18 B20."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import trio
from e2e_tools import Api, api, prompt, until

from tests.server.http_tools import open_stream

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi there"}], "temperature": 0}
CLOSE = 0.1
"""A log probability may differ by this between a token evaluated within a prompt and alone; prompts whose greedy ids
are compared across the two were chosen for clear choices."""
protocols = pytest.mark.parametrize("http2", [False, True], ids=["h1", "h2c"])


def counts(answer: dict[str, Any]) -> tuple[int, int]:
    """Cached and evaluated prompt tokens."""
    return answer["timings"]["cache_n"], answer["timings"]["prompt_n"]


def ids_and_logprobs(answer: dict[str, Any]) -> tuple[list[int], list[float]]:
    return answer["tokens"], [entry["logprob"] for entry in answer["completion_probabilities"]]


async def leave_after(server: Api, path: str, body: dict[str, Any], has_come: Callable[[], Any]) -> None:
    """Sends a request on a connection of its own, and closes that when the time has come."""
    stream, sock = await open_stream(server.served, "http/1.1")
    content = json.dumps(body).encode()
    await stream.send_all(b"POST %s HTTP/1.1\r\nhost: x\r\n" % path.encode())
    await stream.send_all(b"content-length: %d\r\n\r\n" % len(content) + content)
    await until(has_come)
    sock.close()


async def test_b02_a_slot_never_used_finds_what_another_one_left() -> None:
    a, b = list(prompt(60, 20)), list(prompt(80, 2))
    third = {}
    for slot in (1, -1):
        async with api(n_ctx=128, n_parallel=2) as server:
            first = await server.complete(a, 8, id_slot=0)
            await until(lambda: server.engine.stats().saves == 1)
            assert (await server.complete(b, 8, id_slot=0))["id_slot"] == 0
            third[slot] = await server.complete(a, 8, id_slot=slot)
            assert server.engine.stats().restores == 1, "nothing was pushed out, so nothing was tried"
            assert third[slot]["tokens"] == first["tokens"]
    assert third[1]["id_slot"] == 1
    assert counts(third[1]) == counts(third[-1]) == (59, 1)


@protocols
async def test_b08_a_prompt_that_is_known_whole_still_gives_its_first_token(http2: bool) -> None:
    p = list(prompt(90, 48))
    async with api(http2=http2) as server:
        seen: dict[int, tuple[list[int], list[float]]] = {}
        for n, cached in ((90, 0), (90, 89), (90, 89), (33, 32), (90, 89), (1, 0)):
            answer = await server.complete(p[:n], 1, n_probs=3)
            assert counts(answer) == (cached, n - cached)
            assert answer["tokens_evaluated"] == n
            ids, logprobs = ids_and_logprobs(answer)
            expected_ids, expected = seen.setdefault(n, (ids, logprobs))
            assert ids == expected_ids
            assert logprobs == pytest.approx(expected, abs=CLOSE)
        fresh = await server.complete(p[:33], 1, n_probs=3, cache_prompt=False)
        assert counts(fresh) == (0, 33)
        assert fresh["tokens"] == seen[33][0]
        assert ids_and_logprobs(fresh)[1] == pytest.approx(seen[33][1], abs=CLOSE)


async def test_b10_penalties_see_the_prompt_wherever_it_came_from() -> None:
    p = list(prompt(40, 19))
    body = {"repeat_penalty": 1.5, "repeat_last_n": 64, "n_probs": 5}
    async with api() as server:
        first = await server.complete(p, 4, **body)
        cached = await server.complete(p, 4, **body)
        fresh = await server.complete(p, 4, **body, cache_prompt=False)
        assert [counts(answer)[0] for answer in (first, cached, fresh)] == [0, 39, 0]
        assert first["tokens"] != (await server.complete(p, 4))["tokens"], "the penalty changes nothing here"
        for answer in (cached, fresh):
            assert answer["tokens"] == first["tokens"]
            assert ids_and_logprobs(answer)[1] == pytest.approx(ids_and_logprobs(first)[1], abs=CLOSE)
        # The window holds the prompt: a token at its beginning is barred, unless the window ends before it.
        wanted = {"logit_bias": [[p[0], 1e4]], "presence_penalty": 1e6}
        assert p.count(p[0]) == 1
        for reuse in (True, False):
            barred = await server.complete(p, 4, **wanted, repeat_last_n=64, cache_prompt=reuse)
            allowed = await server.complete(p, 4, **wanted, repeat_last_n=30, cache_prompt=reuse)
            assert p[0] not in barred["tokens"]
            assert allowed["tokens"].index(p[0]) == 0
            assert allowed["tokens"].count(p[0]) == 1, "the window does not hold the output"


async def test_b11_cached_tokens_count_as_prompt_and_counters_never_fall() -> None:
    async with api() as server:
        readings = [await server.metrics()]

        async def chat() -> dict[str, Any]:
            usage: dict[str, Any] = (await server.post(CHAT, **HI, max_tokens=4))["usage"]
            readings.append(await server.metrics())
            return usage

        first = await chat()
        started = server.engine.started
        endless = {**HI, "max_tokens": 900, "stream": True}
        await leave_after(server, CHAT, endless, lambda: len(started) == 2 and started[1].n_predicted > 3)
        readings.append(await server.metrics())
        await server.idle()
        assert started[1].finish_reason == "cancelled"
        second = await chat()
    n = first["prompt_tokens"]
    assert (second["prompt_tokens"], first["prompt_tokens_details"], second["prompt_tokens_details"]) == (
        n,
        {"cached_tokens": 0},
        {"cached_tokens": n - 1},
    )
    for before, after in pairwise(readings):
        fallen = [k for k in before if ("_total" in k or "_count" in k) and after[k] < before[k]]
        assert not fallen
    last = readings[-1]
    assert last["llamacpp:prompt_tokens_total"] + last["llamacpp:prompt_tokens_cached_total"] == 3 * n
    assert (last["llamacpp:requests_processing"], last["llamacpp:requests_deferred"]) == (0, 0)


@pytest.mark.parametrize("n_parallel", [1, 2])
async def test_b14_requests_start_in_order_of_arrival(n_parallel: int) -> None:
    async with api(n_parallel=n_parallel) as server:

        async def client(name: int) -> None:
            for i in range(20):
                await server.complete(list(prompt(8, 100 * name + i)), 3)

        async with trio.open_nursery() as nursery:
            for name in range(3):
                nursery.start_soon(client, name)
        sequences = server.engine.started
    assert len(sequences) == 60
    assert [seq.id for seq in sequences] == sorted(seq.id for seq in sequences)
    starts = [seq.started for seq in sequences if seq.started is not None]
    assert len(starts) == 60
    assert starts == sorted(starts)
    if n_parallel == 1:
        assert len(set(starts)) == 60


async def test_b15_a_queued_request_whose_client_left_is_never_run() -> None:
    async with api(n_parallel=1, n_ctx=2048) as server, trio.open_nursery() as nursery:
        first: list[dict[str, Any]] = []

        async def busy() -> None:
            first.append(await server.complete(list(prompt(10, 1)), 600))

        nursery.start_soon(busy)
        stats = server.engine.stats
        await until(lambda: stats().lanes[0].is_processing)
        queued = {"prompt": list(prompt(500, 2)), "n_predict": 200}
        await leave_after(server, "/completion", queued, lambda: stats().n_waiting == 1)
        await until(lambda: stats().n_waiting == 0)
        assert not first, "the first request ended too soon for this to mean anything"
        third = await server.complete(list(prompt(10, 3)), 1)
        assert first
        assert third["tokens_predicted"] == 1
        assert (stats().prompt_tokens, stats().predicted_tokens) == (20, 601)
        assert server.engine.started[1].started is None


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_b16_generation_ends_when_the_client_leaves(stream: bool) -> None:
    body = {"prompt": list(prompt(5)), "n_predict": 10000, "ignore_eos": True, "stream": stream}
    async with api(n_parallel=2, n_ctx=16384) as server, trio.open_nursery() as nursery:
        expected = await server.complete(list(prompt(30, 1)), 150)
        other: list[dict[str, Any]] = []

        async def bystander() -> None:
            other.append(await server.complete(list(prompt(30, 1)), 150, cache_prompt=False))

        nursery.start_soon(bystander)
        started = server.engine.started
        await until(lambda: len(started) == 2)
        await leave_after(server, "/completion", body, lambda: len(started) == 3 and started[2].n_predicted > 5)
        await until(lambda: started[2].finish_reason == "cancelled")
        n = started[2].n_predicted
        after = await server.complete(list(prompt(7, 2)), 20)
        await until(lambda: other)
        assert after["tokens_predicted"] == 20
        assert started[2].n_predicted - n <= 1, "it went on for more than the step in flight"
        assert server.engine.stats().predicted_tokens == 150 + 150 + 20 + started[2].n_predicted
        assert other[0]["tokens"] == expected["tokens"]


async def test_b16_a_client_that_leaves_ends_its_long_prompt() -> None:
    body = {"prompt": list(prompt(8000)), "n_predict": 1}
    async with api(n_ctx=8192, n_ubatch=64) as server:
        stats = server.engine.stats
        await leave_after(server, "/completion", body, lambda: stats().n_decode_steps > 3)
        await server.idle()
        n_evaluated = server.engine.started[0].n_past
        assert 0 < n_evaluated < 7000, "the prompt was evaluated to its end"
        assert stats().predicted_tokens == 0
        resumed = await server.complete(list(prompt(8000))[: n_evaluated + 1], 1)
        assert counts(resumed) == (n_evaluated, 1), "what was evaluated is lost"


@pytest.mark.parametrize("n", [0, 1, 2, 3])
async def test_b18_small_limits_are_exact(n: int) -> None:
    async with api(n_parallel=1) as server:
        answer = await server.complete("a", n)
        assert (answer["tokens_predicted"], len(answer["tokens"])) == (n, n)
        assert (answer["stop_type"], answer["truncated"]) == ("limit", False)
        assert (answer["content"] == "") == (n == 0)
        assert counts(answer) == (0, 1)
        chat = await server.post(CHAT, **HI, max_tokens=n, logit_bias={"271": False, "273": False})
        assert (chat["usage"]["completion_tokens"], chat["choices"][0]["finish_reason"]) == (n, "length")
        events = await server.stream("/completion", prompt="a", n_predict=n, temperature=0, ignore_eos=True)
        assert json.loads(events[-1])["tokens_predicted"] == n
        longer = await server.complete("a", 5)
        assert longer["tokens"][:n] == answer["tokens"]


@protocols
async def test_b20_a_prompt_must_leave_room_for_one_token(http2: bool) -> None:
    n_ctx = 192
    async with api(http2=http2, n_ctx=n_ctx, n_parallel=2) as server:
        fits = await server.complete(list(prompt(n_ctx - 1)), -1)
        assert (fits["tokens_predicted"], fits["stop_type"]) == (1, "limit")
        for n in (n_ctx, n_ctx + 1, 10 * n_ctx):
            for stream in (False, True):
                response = await server.client.post(
                    "/completion", json={"prompt": list(prompt(n)), "n_predict": 5, "stream": stream}
                )
                assert response.status_code == 400
                assert response.headers["content-type"].startswith("application/json")
                error = response.json()["error"]
                assert error["type"] == "exceed_context_size_error"
                assert (error["n_prompt_tokens"], error["n_ctx"]) == (n, n_ctx)
        text = {"messages": [{"role": "user", "content": "x" * 400}]}
        error = (await server.post(CHAT, 400, **text, stream=True))["error"]
        assert (error["type"], error["n_ctx"]) == ("exceed_context_size_error", n_ctx)
        again = await server.complete(list(prompt(n_ctx - 1)), 1)
        assert counts(again) == (n_ctx - 2, 1), "a refused request disturbed what was cached"


async def test_b20_slots_that_do_not_share_hold_their_part_of_the_context() -> None:
    async with api(n_ctx=256, n_parallel=4, kv_unified=False) as server:
        assert (await server.complete(list(prompt(63)), -1))["tokens_predicted"] == 1
        error = (await server.post("/completion", 400, prompt=list(prompt(64))))["error"]
        assert (error["n_prompt_tokens"], error["n_ctx"]) == (64, 64)
