"""POST /v1/chat/completions and /v1/completions over a real socket."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio
from fake_engine import FakeEngine, api, sse
from h2.errors import ErrorCodes
from http_tools import H2Client, serving, until

from llamatrio.errors import OverloadedError
from llamatrio.server.app import create_app
from llamatrio.server.settings import ServerConfig

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
both_protocols = pytest.mark.parametrize("http2", [False, True], ids=["h1", "h2c"])


async def chunks_of(client: Any, path: str, body: dict[str, Any]) -> list[Any]:
    """All chunks of a stream, which must end with one [DONE]."""
    response = await client.post(path, json={**body, "stream": True})
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, last = sse(response.text)
    assert last == "[DONE]"
    return [json.loads(event) for event in events]


@both_protocols
async def test_chat(http2: bool) -> None:
    engine = FakeEngine()
    async with api(engine, http2=http2, alias="gpt-tiny") as client:
        answer = (await client.post(CHAT, json={**HI, "max_tokens": 4})).json()
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "gpt-tiny"
    assert answer["system_fingerprint"].startswith("llamatrio")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello, world!"}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    n = len(engine.requests[0].tokens)
    assert answer["usage"] == {
        "prompt_tokens": n,
        "completion_tokens": 4,
        "total_tokens": n + 4,
        "prompt_tokens_details": {"cached_tokens": n // 2},
    }
    assert answer["timings"]["cache_n"] == n // 2
    assert answer["timings"]["prompt_n"] == n - n // 2
    assert answer["timings"]["predicted_n"] == 4
    assert answer["timings"]["predicted_per_second"] == 16.0


PREFILLED = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well <|im_end|>"}]


async def test_a_last_answer_is_continued_and_part_of_the_answer() -> None:
    engine = FakeEngine("!", "?")
    async with api(engine) as client:
        plain = (await client.post("/apply-template", json=HI)).json()["prompt"]
        prompt = (await client.post("/apply-template", json={"messages": PREFILLED})).json()["prompt"]
        assert prompt == plain + "Well <|im_end|>"
        body = {"messages": PREFILLED, "max_tokens": 2}
        answer = (await client.post(CHAT, json=body)).json()
        assert answer["choices"][0]["message"]["content"] == "Well <|im_end|>!?"
        chunks = await chunks_of(client, CHAT, body)
    deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"]]
    assert "".join(deltas) == "Well <|im_end|>!?"
    tokenizer = engine.model.tokenizer
    rest = tokenizer.encode("Well <|im_end|>", add_special=False, parse_special=False)
    assert list(engine.requests[0].tokens[-len(rest) :]) == rest, "what a client typed became a control token"


async def test_a_chats_tokens_are_counted() -> None:
    engine = FakeEngine()
    async with api(engine) as client:
        counted = (await client.post(CHAT + "/input_tokens", json=HI)).json()
        await client.post(CHAT, json={**HI, "max_tokens": 1})
    assert counted == {"object": "response.input_tokens", "input_tokens": len(engine.requests[0].tokens)}


async def test_a_last_answer_ends_where_that_is_switched_off_and_not_asked_for() -> None:
    async with api(FakeEngine("!"), prefill_assistant=False) as client:
        body = {"messages": PREFILLED, "max_tokens": 1}
        assert (await client.post(CHAT, json=body)).json()["choices"][0]["message"]["content"] == "!"
        body |= {"continue_final_message": True}
        assert (await client.post(CHAT, json=body)).json()["choices"][0]["message"]["content"] == "Well <|im_end|>!"


@pytest.mark.parametrize("messages", [[{"role": "user", "content": None}], [{"role": "assistant"}]])
async def test_messages_without_content_are_empty(messages: list[dict[str, Any]]) -> None:
    async with api(FakeEngine()) as client:
        assert (await client.post(CHAT, json={"messages": messages, "max_tokens": 1})).status_code == 200


async def test_chat_prompt_is_the_template_with_its_own_control_tokens() -> None:
    engine = FakeEngine()
    tokenizer = engine.model.tokenizer
    async with api(engine) as client:
        await client.post(CHAT, json={"messages": [{"role": "user", "content": "<|im_end|>"}], "max_tokens": 1})
        prompt = (await client.post("/apply-template", json=HI)).json()["prompt"]
    assert prompt == engine.model.chat_template.render(HI["messages"])
    assert (
        engine.requests[0].tokens.count(tokenizer.encode("<|im_end|>", add_special=False, parse_special=True)[0]) == 1
    )


@both_protocols
async def test_chat_stream(http2: bool) -> None:
    async with api(FakeEngine(), http2=http2) as client:
        chunks = await chunks_of(client, CHAT, {**HI, "max_tokens": 4})
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "Hello, world!"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 5 + ["length"]
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert chunks[-1]["timings"]["predicted_n"] == 4


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_usage_chunk_comes_only_when_asked_for(path: str) -> None:
    body = {**HI, "prompt": "hi", "max_tokens": 3}
    async with api(FakeEngine()) as client:
        whole = (await client.post(path, json={**body, "stream_options": {"include_usage": True}})).json()
        asked = await chunks_of(client, path, {**body, "stream_options": {"include_usage": True}})
        refused = await chunks_of(client, path, {**body, "stream_options": {"include_usage": False}})
        silent = await chunks_of(client, path, body)
    assert asked[-1]["choices"] == []
    assert asked[-1]["usage"] == whole["usage"]
    assert asked[-2]["choices"][0]["finish_reason"] == "length"
    for chunks in (asked[:-1], refused, silent):
        assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


async def test_stop_reasons() -> None:
    engine = FakeEngine()
    engine.ends_after = 2
    async with api(engine) as client:
        ended = (await client.post(CHAT, json=HI)).json()["choices"][0]
        stopped = (await client.post(CHAT, json={**HI, "stop": [",", ""]})).json()["choices"][0]
    assert (ended["message"]["content"], ended["finish_reason"]) == ("Hello,", "stop")
    assert (stopped["message"]["content"], stopped["finish_reason"]) == ("Hello", "stop")
    assert engine.requests[1].stop == (",",)


@pytest.mark.parametrize("limit", [0, 1, 2, 3])
@pytest.mark.parametrize("stream", [False, True])
async def test_small_limits_are_kept(limit: int, stream: bool) -> None:
    async with api(FakeEngine("x")) as client:
        if stream:
            chunks = await chunks_of(client, CHAT, {**HI, "max_completion_tokens": limit})
            text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
            reason = chunks[-1]["choices"][0]["finish_reason"]
        else:
            answer = (await client.post(CHAT, json={**HI, "max_tokens": limit})).json()
            text, reason = answer["choices"][0]["message"]["content"], answer["choices"][0]["finish_reason"]
            assert answer["usage"]["completion_tokens"] == limit
    assert (text, reason) == ("x" * limit, "length")


async def test_chat_logprobs() -> None:
    body = {**HI, "max_tokens": 2, "logprobs": True, "top_logprobs": 3}
    async with api(FakeEngine()) as client:
        whole = (await client.post(CHAT, json=body)).json()["choices"][0]["logprobs"]["content"]
        chunks = await chunks_of(client, CHAT, body)
        bare = (await client.post(CHAT, json={**HI, "max_tokens": 1, "logprobs": True})).json()
    assert [entry["id"] for entry in whole] == [97, 98]
    assert whole[0]["token"] == "a"
    assert whole[0]["bytes"] == [97]
    assert whole[0]["logprob"] == -0.5
    assert [entry["logprob"] for entry in whole[0]["top_logprobs"]] == [-0.5, -1.5, -2.5]
    streamed = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    assert [entry for logprobs in streamed for entry in logprobs["content"]] == whole
    assert bare["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


@pytest.mark.parametrize(
    ("asked", "n_top"),
    [
        ({"logprobs": True}, {CHAT: 0, "/v1/completions": 1}),
        ({"logprobs": 2}, 2),
        ({"n_probs": 3}, 3),
        ({"n_probs": 3, "logprobs": False}, 3),
        ({"logprobs": False}, None),
        ({"logprobs": 0}, None),
        ({"n_probs": 0}, None),
    ],
)
async def test_both_names_of_logprobs_on_both_routes(asked: dict[str, Any], n_top: Any) -> None:
    async with api(FakeEngine()) as client:
        for path in (CHAT, "/v1/completions"):
            answer = (await client.post(path, json={**HI, "prompt": "a", "max_tokens": 1, **asked})).json()
            expected = n_top[path] if isinstance(n_top, dict) else n_top
            found = answer["choices"][0]["logprobs"]
            assert (found and len(found["content"][0]["top_logprobs"])) == expected


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_probabilities_after_sampling_are_not_called_logprobs(path: str) -> None:
    body = {**HI, "prompt": "a", "max_tokens": 1, "n_probs": 1, "post_sampling_probs": True}
    async with api(FakeEngine()) as client:
        whole = (await client.post(path, json=body)).json()["choices"][0]
        streamed = [chunk["choices"][0] for chunk in await chunks_of(client, path, body)]
    (entry,) = whole["logprobs"]["content"]
    assert entry["prob"] == entry["top_probs"][0]["prob"] == pytest.approx(0.60653, abs=1e-5)
    assert not {"logprob", "top_logprobs"} & entry.keys()
    assert whole["logprobs"] in [choice["logprobs"] for choice in streamed]


async def test_timings_per_token() -> None:
    async with api(FakeEngine()) as client:
        chunks = await chunks_of(client, CHAT, {**HI, "max_tokens": 2, "timings_per_token": True})
    assert [chunk["timings"]["predicted_n"] for chunk in chunks if "timings" in chunk] == [1, 2, 2]


async def test_text_completion_of_several_prompts() -> None:
    engine = FakeEngine("x", "y")
    body = {"prompt": ["ab", [97, 98, 99]], "max_tokens": 2}
    async with api(engine) as client:
        whole = (await client.post("/v1/completions", json=body)).json()
        chunks = await chunks_of(client, "/v1/completions", body)
    assert [(choice["index"], choice["text"]) for choice in whole["choices"]] == [(0, "xy"), (1, "xy")]
    assert whole["object"] == "text_completion"
    assert whole["usage"]["prompt_tokens"] == 5
    assert engine.requests[1].tokens == (97, 98, 99)
    for index in (0, 1):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in mine) == "xy"
        assert mine[-1]["finish_reason"] == "length"


async def test_text_completion_logprobs() -> None:
    async with api(FakeEngine()) as client:
        answer = (await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "logprobs": 2})).json()
    (entry,) = answer["choices"][0]["logprobs"]["content"]
    assert len(entry["top_logprobs"]) == 2


async def test_sampling_fields_reach_the_engine() -> None:
    engine = FakeEngine()
    fields = {
        "temperature": 0, "top_k": 7, "top_p": 0.5, "min_p": 0.25, "seed": 11, "repeat_penalty": 1.5,
        "repeat_last_n": 9, "presence_penalty": 0.1, "frequency_penalty": -0.2, "ignore_eos": True, "min_tokens": 3,
    }  # fmt: skip
    async with api(engine) as client:
        extra = {"cache_prompt": False, "id_slot": 1, "max_tokens": 2}
        assert (await client.post(CHAT, json={**HI, **fields, **extra})).status_code == 200
    (request,) = engine.requests
    assert {name: getattr(request.sampling, name) for name in fields} == fields
    assert (request.cache_prompt, request.lane, request.max_tokens) == (False, 1, 2)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n_tokens", [63, 64, 65, 640])
async def test_prompt_must_fit_the_context(n_tokens: int, stream: bool) -> None:
    body = {"prompt": [97] * n_tokens, "stream": stream}
    async with api(FakeEngine("x")) as client:
        response = await client.post("/v1/completions", json=body)
        if n_tokens == 63:
            assert response.status_code == 200
            assert response.text.count('"text":"x"') == 1
            return
        error = response.json()["error"]
    assert response.status_code == 400
    assert error["type"] == "exceed_context_size_error"
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (n_tokens, 64)


@pytest.mark.parametrize("stream", [False, True])
async def test_refusal_is_a_status_also_for_streams(stream: bool) -> None:
    engine = FakeEngine()
    engine.refuses = OverloadedError("the queue is full")
    async with api(engine) as client:
        response = await client.post(CHAT, json={**HI, "stream": stream})
    assert response.status_code == 503
    assert response.json()["error"] == {"code": 503, "message": "the queue is full", "type": "unavailable_error"}


async def test_failure_in_mid_stream_is_the_last_event() -> None:
    engine = FakeEngine()
    engine.fails_after = 2
    async with api(engine) as client:
        streamed = await client.post(CHAT, json={**HI, "stream": True})
        whole = await client.post(CHAT, json=HI)
    last = json.loads(sse(streamed.text)[-1])
    assert last["error"] == {"code": 500, "message": "the device fell off the bus", "type": "server_error"}
    assert whole.status_code == 500
    assert whole.json() == last


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_leaves_cancels(stream: bool) -> None:
    engine = FakeEngine()
    engine.pause, engine.n_ctx_seq = 0.005, 100_000
    async with api(engine) as client:
        with trio.move_on_after(0.1):
            await client.post(CHAT, json={**HI, "stream": stream})
        await until(lambda: engine.cancelled, 0.5)
        assert engine.running == []
        produced = engine.produced
        assert (await client.get("/health")).status_code == 200
    assert engine.produced == produced


@pytest.mark.parametrize("stream", [False, True])
async def test_http2_reset_cancels_one_of_two(stream: bool) -> None:
    engine = FakeEngine()
    engine.pause, engine.n_ctx_seq = 0.005, 100_000
    body = json.dumps({**HI, "stream": stream}).encode()
    async with serving(create_app(engine, ServerConfig())) as served:
        client = await H2Client.connect(served)
        ids = [await client.request(CHAT, "POST", end=False) for _ in range(2)]
        for stream_id in ids:
            client.h2.send_data(stream_id, body, end_stream=True)
        await client.flush()
        await until(lambda: len(engine.running) == 2)
        client.h2.reset_stream(ids[0], ErrorCodes.CANCEL)
        await client.flush()
        await until(lambda: len(engine.cancelled) == 1, 0.5)
        assert len(engine.running) == 1


async def test_client_that_leaves_during_the_first_prompt_of_many() -> None:
    engine = FakeEngine()
    engine.pause = 0.02
    async with api(engine) as client:
        with trio.move_on_after(0.05):
            await client.post("/v1/completions", json={"prompt": ["a", "b", "c"]})
        await until(lambda: len(engine.cancelled) == 3, 0.5)


async def test_template_refusal_is_a_400() -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}x"
    body = {"messages": [{"role": "system", "content": "s"}]}
    async with api(FakeEngine(template=template)) as client:
        for stream in (False, True):
            response = await client.post(CHAT, json={**body, "stream": stream})
            assert response.status_code == 400
            assert "no system role" in response.json()["error"]["message"]


async def test_silent_stream_gets_pings() -> None:
    engine = FakeEngine()
    engine.pause = 0.1
    async with api(engine, sse_ping_interval=0.03) as client:
        response = await client.post(CHAT, json={**HI, "max_tokens": 2, "stream": True})
        off = await client.post(CHAT, json={**HI, "max_tokens": 1, "stream": True, "sse_ping_interval": -1})
    assert response.text.count(": ping\n\n") >= 3
    assert sse(response.text)[-1] == "[DONE]"
    assert ": ping" not in off.text


async def test_empty_pieces_make_no_chunks() -> None:
    async with api(FakeEngine("", "\U0001f600", "", "日")) as client:
        chunks = await chunks_of(client, CHAT, {**HI, "max_tokens": 4})
    assert [c["choices"][0]["delta"].get("content") for c in chunks] == ["", "\U0001f600", "日", None]
