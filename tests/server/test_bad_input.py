"""Wrong input gets a 400 that names the field, as valid JSON, and the connection goes on. Never a 500."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from fake_engine import FakeEngine, api
from hypothesis import given, settings
from hypothesis import strategies as st

from llamatrio.errors import RequestError
from llamatrio.server.schemas import ChatBody, CompletionBody, decode_body
from llamatrio.server.unoffered import ROUTES

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}
ASSISTANT = {"role": "assistant", "content": "hi"}


async def refused(client: Any, path: str, body: Any, field: str | None) -> str:
    """Posts what must be refused; returns the message."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = await client.post(path, content=content)
    error = json.loads(response.content.decode("utf-8"))["error"]
    assert response.status_code == 400, error
    assert (error["code"], error["type"]) == (400, "invalid_request_error")
    assert error["param"] == field
    assert (await client.get("/health")).status_code == 200
    return str(error["message"])


async def test_bodies_that_are_no_json() -> None:
    async with api(FakeEngine()) as client:
        for path in (CHAT, "/v1/completions", "/completion", "/tokenize", "/detokenize", "/apply-template"):
            for body in (
                b'{"prompt": "\xe6\xad", "content": "\xe6\xad"}',
                json.dumps(HI).encode("utf-16"),
                b'{"prompt": "\\ud83d", "content": "\\ud83d", "tokens": "\\ud83d", "messages": "\\ud83d"}',
                b"",
                b"[1]",
                b"{" * 50,
                b'{"a":' * 100_000,
                b'{"prompt": NaN}',
            ):
                await refused(client, path, body, None)


async def test_nul_is_ordinary_text() -> None:
    engine = FakeEngine()
    async with api(engine) as client:
        response = await client.post("/completion", json={"prompt": "a\x00b", "n_predict": 0})
    assert response.json()["prompt"] == "a\x00b"
    assert len(engine.requests[0].tokens) == 3


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ([-1], "prompt[0]"),
        ([288], "prompt[0]"),
        ([2**63], "prompt[0]"),
        ([2**200], "prompt[0]"),
        ([97, 1.5], "prompt[1]"),
        ([True], "prompt[0]"),
        ([None], "prompt[0]"),
        ([[-1]], "prompt[0][0]"),
        ([[97], [97, True]], "prompt[1][1]"),
        (["a", {}], "prompt[1]"),
        ([97, ["a"]], "prompt[1]"),
        ([], "prompt"),
        ([[]], "prompt[0]"),
        ("", "prompt"),
        (None, "prompt"),
        (5, "prompt"),
        ({"prompt_string": 5}, "prompt"),
        ({"prompt_string": "a", "multimodal_data": ["x"]}, "prompt"),
    ],
)
async def test_prompts(prompt: Any, field: str) -> None:
    async with api(FakeEngine()) as client:
        for path in ("/completion", "/v1/completions"):
            await refused(client, path, {"prompt": prompt}, field)


async def test_prompts_that_are_fine() -> None:
    engine = FakeEngine()
    async with api(engine) as client:
        for prompt in ("a", ["a"], [97], [97, "b"], {"prompt_string": "a"}, [{"prompt_string": "a"}]):
            assert (await client.post("/completion", json={"prompt": prompt, "n_predict": 0})).status_code == 200
    assert {request.tokens for request in engine.requests} == {(97,), (97, 98)}


@pytest.mark.parametrize("tokens", [[-1], [288], [2**63], [1.5], [True], [[1]], ["a"], "a", 1])
async def test_detokenize(tokens: Any) -> None:
    async with api(FakeEngine()) as client:
        await refused(client, "/detokenize", {"tokens": tokens}, "tokens[0]" if isinstance(tokens, list) else "tokens")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[(name, value) for name in ("n_predict", "max_tokens") for value in (-3, 1.5, 5.0, True, "5")],
        ("temperature", "hot"),
        ("temperature", True),
        ("top_k", 1.5),
        ("top_p", "1"),
        ("min_p", True),
        ("temperature", 2e9),
        ("presence_penalty", -2e9),
        ("sse_ping_interval", 10**400),
        ("seed", "x"),
        ("repeat_penalty", 0),
        ("repeat_penalty", -1),
        ("repeat_last_n", -2),
        ("stop", 5),
        ("stop", {"a": 1}),
        ("stream", 1),
        ("min_tokens", -1),
        ("ignore_eos", "yes"),
        ("id_slot", 2),
        ("id_slot", -2),
        ("logit_bias", 5),
        ("stream_options", []),
        ("response_fields", "content"),
        ("n_probs", -1),
    ],
)
async def test_fields(field: str, value: Any) -> None:
    async with api(FakeEngine()) as client:
        message = await refused(client, "/completion", {"prompt": "a", field: value}, field)
        assert message.startswith(field)


@pytest.mark.parametrize(
    ("bias", "field"),
    [
        ({"-1": 1}, "logit_bias.-1"),
        ({"288": 1}, "logit_bias.288"),
        ({"x": 1}, "logit_bias.x"),
        ({"1": "a"}, "logit_bias.1"),
        ({"1": True}, "logit_bias.1"),
        ([[288, 1]], "logit_bias[0]"),
        ([[97, 1], [97]], "logit_bias[1]"),
        ([[True, 1]], "logit_bias[0]"),
        ([[97, None]], "logit_bias[0]"),
        ([5], "logit_bias[0]"),
        ({"1": 10**400}, "logit_bias.1"),
        ([[1, -(10**400)]], "logit_bias[0]"),
        ([[1, 1], [1, 2e9]], "logit_bias[1]"),
        ([[10**400, 1]], "logit_bias[0]"),
        ({"9" * 400: 1}, "logit_bias." + "9" * 400),
    ],
)
async def test_logit_bias(bias: Any, field: str) -> None:
    async with api(FakeEngine()) as client:
        await refused(client, CHAT, {**HI, "logit_bias": bias}, field)


@pytest.mark.parametrize("number", [b"1e999", b"NaN", b"-Infinity"])
async def test_numbers_must_be_finite(number: bytes) -> None:
    async with api(FakeEngine()) as client:
        for field in (b'"logit_bias": {"1": %b}', b'"n_predict": %b', b'"temperature": %b', b'"prompt": [%b]'):
            body = b'{"prompt": "a", ' + field % number + b"}"
            assert (await client.post("/completion", content=body)).status_code == 400


@pytest.mark.parametrize("digits", [30, 400, 4301])
@pytest.mark.parametrize("sign", ["", "-"])
@pytest.mark.parametrize("route", ["/completion", CHAT])
async def test_integers_of_any_length_are_read_or_refused_by_name(digits: int, sign: str, route: str) -> None:
    number = sign + "1" + "0" * digits
    fields = [f'"{name}": {number}' for name in ("top_k", "seed", "n_predict", "id_slot", "sse_ping_interval", "top_p")]
    fields += [f'"logit_bias": {value % number}' for value in ('{"1": %s}', "[[1, %s]]", "[[%s, 1]]", '{"%s": 1}')]
    engine = FakeEngine()
    engine.ends_after = 1
    async with api(engine) as client:
        for field in fields:
            for stream in ("true", "false"):
                body = f'{{"prompt": "a", "messages": {json.dumps(HI["messages"])}, "stream": {stream}, {field}}}'
                response = await client.post(route, content=body.encode())
                if response.status_code != 200:
                    assert response.status_code == 400, response.text
                    assert response.json()["error"]["param"].startswith(field.split('"')[1])


@pytest.mark.parametrize(
    ("field", "values", "taken_as"),
    [
        ("top_p", (1, 1.1, 50), 1.0),
        ("top_p", (0, -0.1, -5), 0.0),
        ("min_p", (0, -0.1), 0.0),
        ("min_p", (1.0, 7), 1.0),
        ("temperature", (0, -0.0, -1), 0.0),
        ("top_k", (0, -1, -(2**40)), 0),
        ("repeat_last_n", (-1,), -1),
        ("presence_penalty", (-2.5,), -2.5),
        ("frequency_penalty", (3,), 3.0),
    ],
)
async def test_what_llama_server_brings_into_range_is_taken_alike(field: str, values: Any, taken_as: float) -> None:
    engine = FakeEngine()
    async with api(engine) as client:
        for value in values:
            for body in ({**HI}, {"prompt": "a"}):
                route = CHAT if "messages" in body else "/completion"
                assert (await client.post(route, json={**body, field: value, "max_tokens": 1})).status_code == 200
    assert {getattr(request.sampling, field) for request in engine.requests} == {taken_as}


async def test_all_forms_of_a_ban_are_one() -> None:
    engine = FakeEngine()
    async with api(engine) as client:
        for bias in ({"97": False}, [[97, False]], [["a", False]]):
            assert (await client.post(CHAT, json={**HI, "logit_bias": bias, "max_tokens": 1})).status_code == 200
        for bias in ({"97": -100}, [[97, -100]], [["a", -100]]):
            assert (await client.post(CHAT, json={**HI, "logit_bias": bias, "max_tokens": 1})).status_code == 200
    found = [request.sampling.logit_bias for request in engine.requests]
    assert found == [((97, float("-inf")),)] * 3 + [((97, -100.0),)] * 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("grammar", 'root ::= "a"'),
        ("json_schema", {}),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "foo"}),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("n", 2),
        ("n", True),
        ("best_of", 3),
        ("echo", True),
        ("suffix", "x"),
        ("mirostat", 2),
        ("mirostat", True),
        ("min_keep", 3),
        ("adaptive_target", 0),
        ("dry_multiplier", -1),
        ("typical_p", 0.9),
        ("thinking_budget_tokens", 0),
        ("lora", [{"id": 0}]),
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/completion"])
async def test_what_is_not_offered_is_refused_by_name(path: str, field: str, value: Any) -> None:
    async with api(FakeEngine()) as client:
        message = await refused(client, path, {**HI, "prompt": "a", field: value}, field)
    assert message == f"{field}: this server does not offer it"


async def test_neutral_unknown_and_null_fields_are_accepted() -> None:
    neutral = {
        "grammar": "", "json_schema": None, "response_format": {"type": "text"}, "tools": [], "tool_choice": "auto",
        "n": 1, "echo": False, "mirostat": 0, "typical_p": 1.0, "dry_multiplier": 0.0, "top_n_sigma": -1.0,
        "max_tokens": 1, "temperature": None, "stop": None, "logit_bias": None, "user": "me", "metadata": {"a": 1},
    }  # fmt: skip
    async with api(FakeEngine()) as client:
        assert (await client.post(CHAT, json={**HI, **neutral})).status_code == 200


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("adaptive_target", (-0.01, -1)),
        ("top_n_sigma", (0, -1, -5.0)),
        ("typical_p", (1, 1.5)),
        ("xtc_probability", (0, 0.0, -1)),
        ("dynatemp_range", (0, -1)),
        ("t_max_predict_ms", (0, -1)),
        ("mirostat", (0, -1)),
        ("min_keep", (0, 1)),
        ("response_format", ({}, {"type": "text"})),
        ("tool_choice", ("none", "auto")),
    ],
)
async def test_whatever_switches_a_part_off_is_accepted(field: str, values: tuple[Any, ...]) -> None:
    async with api(FakeEngine()) as client:
        for value in values:
            assert (await client.post(CHAT, json={**HI, field: value, "max_tokens": 1})).status_code == 200


async def test_a_byte_order_mark_is_no_part_of_the_body() -> None:
    async with api(FakeEngine()) as client:
        answer = await client.post("/tokenize", content=b"\xef\xbb\xbf" + b'{"content": "a"}')
        assert answer.json() == {"tokens": [97]}
        await refused(client, "/tokenize", b"\xef\xbb\xbf" * 2 + b'{"content": "a"}', None)


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": 5, "content": "hi"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": ["hi"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
    ],
)
async def test_messages(messages: Any, field: str) -> None:
    async with api(FakeEngine()) as client:
        await refused(client, CHAT, {"messages": messages}, field)
        await refused(client, "/apply-template", {"messages": messages}, field)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"messages": [ASSISTANT, ASSISTANT]}, "messages"),
        ({"messages": [{**ASSISTANT, "tool_calls": [{}]}]}, "messages"),
        ({**HI, "continue_final_message": True}, "messages"),
        ({**HI, "continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({**HI, "continue_final_message": "yes"}, "continue_final_message"),
        ({**HI, "chat_template_kwargs": {"continue_final": True}}, "chat_template_kwargs"),
    ],
)
async def test_what_cannot_be_continued(body: dict[str, Any], field: str) -> None:
    async with api(FakeEngine()) as client:
        await refused(client, CHAT, body, field)
        await refused(client, "/apply-template", body, field)


@pytest.mark.parametrize("path", [path for paths in ROUTES.values() for path in paths])
async def test_routes_of_what_is_not_offered_say_so(path: str) -> None:
    async with api(FakeEngine(), api_prefix="/llm") as client:
        response = await client.post("/llm" + path.replace("<int:_slot>", "0"), json={})
        assert (response.status_code, response.json()["error"]["type"]) == (501, "not_supported_error")
        assert (await client.get("/llm/lora-adapters")).json() == []


async def test_missing_messages_and_stray_top_logprobs() -> None:
    async with api(FakeEngine()) as client:
        await refused(client, CHAT, {}, "messages")
        for logprobs in ({}, {"logprobs": False}, {"logprobs": 2}):
            await refused(client, CHAT, {**HI, "top_logprobs": 3, **logprobs}, "top_logprobs")


async def test_routes_that_do_not_exist() -> None:
    async with api(FakeEngine()) as client:
        missing = await client.get("/nothing/\u00e9")
        assert missing.status_code == 404
        assert missing.json()["error"] == {"code": 404, "message": "File Not Found", "type": "not_found_error"}
        wrong = await client.get("/completion")
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, 405)
        assert "POST" in wrong.headers["allow"]


@pytest.mark.parametrize("http2", [False, True], ids=["h1", "h2c"])
async def test_body_over_the_limit(http2: bool) -> None:
    async with api(FakeEngine(), http2=http2, max_body_bytes=1000) as client:
        response = await client.post("/completion", json={"prompt": "a" * 200_000})
        assert (response.status_code, response.json()["error"]["code"]) == (413, 413)
        assert (await client.get("/health")).status_code == 200


async def test_what_nobody_expected_is_a_500_in_json(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine()
    engine.start = lambda request: 1 / 0  # type: ignore[assignment, method-assign, return-value]
    async with api(engine) as client:
        response = await client.post("/completion", json={"prompt": "a"})
        assert response.status_code == 500
        assert response.json()["error"] == {"code": 500, "message": "internal error", "type": "server_error"}
        assert (await client.get("/health")).status_code == 200
    assert "ZeroDivisionError" in caplog.text


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(CompletionBody.__struct_fields__), json_values, max_size=4))
def test_any_body_is_read_or_refused(body: dict[str, Any]) -> None:
    for kind in (CompletionBody, ChatBody):
        with suppress(RequestError):
            decode_body(json.dumps(body).encode(), kind)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=40))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with suppress(RequestError):
        decode_body(data, CompletionBody)
