"""llama-server's own routes over a real socket."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from fake_engine import STATS, FakeEngine, api, sse

from llamatrio.model.chat import ChatTemplate
from llamatrio.sched.types import SamplingParams
from llamatrio.server.app import create_app
from llamatrio.server.settings import ServerConfig


async def events_of(client: Any, body: dict[str, Any]) -> list[Any]:
    response = await client.post("/completion", json={**body, "stream": True})
    assert response.status_code == 200
    return [json.loads(event) for event in sse(response.text)]


@pytest.mark.parametrize("path", ["/completion", "/completions"])
async def test_completion(path: str) -> None:
    engine = FakeEngine()
    async with api(engine) as client:
        body = {"prompt": "hello", "n_predict": 3, "seed": 5, "stop": "@"}
        answer = (await client.post(path, json=body)).json()
    n = len(engine.requests[0].tokens)
    assert answer["content"] == "Hello, world"
    assert answer["tokens"] == []
    assert (answer["stop"], answer["stop_type"], answer["stopping_word"]) == (True, "limit", "")
    assert (answer["tokens_predicted"], answer["tokens_evaluated"]) == (3, n)
    assert answer["tokens_cached"] == n + 2
    assert (answer["model"], answer["prompt"], answer["id_slot"], answer["index"]) == ("tiny", "hello", 1, 0)
    assert (answer["truncated"], answer["has_new_line"]) == (False, False)
    settings = answer["generation_settings"]
    assert (settings["seed"], settings["n_predict"], settings["stop"]) == (42, 3, ["@"])
    assert answer["timings"]["prompt_n"] + answer["timings"]["cache_n"] == n
    assert "completion_probabilities" not in answer


async def test_stream_matches_the_whole_answer() -> None:
    body = {"prompt": "hello", "n_predict": 3, "return_tokens": True, "n_probs": 2, "timings_per_token": True}
    async with api(FakeEngine("a", "\n", "c")) as client:
        whole = (await client.post("/completion", json=body)).json()
        *pieces, last = await events_of(client, body)
    assert "".join(piece["content"] for piece in pieces) == whole["content"] == "a\nc"
    assert [id for piece in pieces for id in piece["tokens"]] == whole["tokens"] == [97, 98, 99]
    probs = [entry for piece in pieces for entry in piece["completion_probabilities"]]
    assert probs == whole["completion_probabilities"]
    assert [piece["tokens_predicted"] for piece in pieces] == [1, 2, 3]
    assert all("timings" in piece and piece["stop"] is False and piece["id_slot"] == 1 for piece in pieces)
    ignored = {"content", "tokens", "completion_probabilities", "generation_settings"}
    assert {k: v for k, v in last.items() if k not in ignored} == {k: v for k, v in whole.items() if k not in ignored}
    assert (last["content"], last["has_new_line"]) == ("", True)


@pytest.mark.parametrize("n", [0, 1, 2, 3])
async def test_small_limits_are_kept(n: int) -> None:
    engine = FakeEngine("x")
    async with api(engine) as client:
        answer = (await client.post("/completion", json={"prompt": "a", "n_predict": n, "ignore_eos": True})).json()
    assert (answer["tokens_predicted"], answer["content"], answer["stop_type"]) == (n, "x" * n, "limit")


async def test_what_a_request_does_not_say_comes_from_the_settings() -> None:
    engine = FakeEngine()
    biased = SamplingParams(logit_bias=((5, 1.0),))
    async with api(engine, max_tokens=2, stop=("@",), cache_prompt=False, sampling=biased) as client:
        await client.post("/completion", json={"prompt": "a"})
        said = {"prompt": "a", "n_predict": -1, "stop": [], "cache_prompt": True, "logit_bias": [[6, 2]]}
        await client.post("/completion", json=said)
        params = (await client.get("/props")).json()["default_generation_settings"]["params"]
    unsaid, said = engine.requests
    assert (unsaid.max_tokens, unsaid.stop, unsaid.cache_prompt) == (2, ("@",), False)
    assert (said.max_tokens, said.stop, said.cache_prompt) == (-1, (), True)
    assert (unsaid.sampling.logit_bias, said.sampling.logit_bias) == (((5, 1.0),), ((6, 2.0),))
    assert (params["n_predict"], params["stop"]) == (2, ["@"])


async def test_a_requests_own_template_variables_go_before_the_defaults() -> None:
    engine = FakeEngine()
    engine.model = replace(engine.model, chat_template=ChatTemplate("{{ a }}{{ b }}{{ messages[0].content }}"))
    body = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"b": 3}}
    async with api(engine, template_variables={"a": 1, "b": 2}) as client:
        assert (await client.post("/apply-template", json=body)).json()["prompt"] == "13x"


@pytest.mark.parametrize(
    ("said", "prompt"),
    [
        ({}, "low-True"),
        ({"reasoning_effort": None}, "low-True"),
        ({"reasoning_effort": "high"}, "high-True"),
        ({"reasoning_effort": "none"}, "low-False"),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}, "high-False"),
    ],
)
async def test_reasoning_effort_reaches_the_template(said: dict[str, Any], prompt: str) -> None:
    engine = FakeEngine(template="{{ reasoning_effort }}-{{ enable_thinking }}")
    defaults = {"reasoning_effort": "low", "enable_thinking": True}
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, **said}
    async with api(engine, template_variables=defaults) as client:
        assert (await client.post("/apply-template", json=body)).json()["prompt"] == prompt
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    assert engine.model.tokenizer.decode(engine.requests[0].tokens) == prompt


def test_default_biases_must_be_of_tokens_that_exist() -> None:
    settings = ServerConfig(sampling=SamplingParams(logit_bias=((10**6, 1.0),)))
    with pytest.raises(ValueError, match="expected logit_bias of tokens from 0 to"):
        create_app(FakeEngine(), settings)


async def test_stop_types() -> None:
    engine = FakeEngine()
    engine.ends_after = 2
    async with api(engine) as client:
        eos = (await client.post("/completion", json={"prompt": "a"})).json()
        word = (await client.post("/completion", json={"prompt": "a", "stop": [","]})).json()
    assert (eos["stop_type"], eos["content"]) == ("eos", "Hello,")
    assert (word["stop_type"], word["stopping_word"], word["content"]) == ("word", ",", "Hello")


async def test_probabilities_after_sampling() -> None:
    body = {"prompt": "a", "n_predict": 1, "n_probs": 2, "post_sampling_probs": True}
    async with api(FakeEngine()) as client:
        (entry,) = (await client.post("/completion", json=body)).json()["completion_probabilities"]
    assert entry["prob"] == pytest.approx(0.60653, abs=1e-5)
    assert [other["prob"] for other in entry["top_probs"]] == pytest.approx([0.60653, 0.22313], abs=1e-5)
    assert "logprob" not in entry


async def test_several_prompts_give_a_list() -> None:
    async with api(FakeEngine("x")) as client:
        answers = (await client.post("/completion", json={"prompt": ["a", "bc"], "n_predict": 2})).json()
        streamed = await events_of(client, {"prompt": ["a", "bc"], "n_predict": 1})
    assert [(answer["index"], answer["prompt"]) for answer in answers] == [(0, "a"), (1, "bc")]
    assert [(event["index"], event["stop"]) for event in streamed] == [(0, False), (0, True), (1, False), (1, True)]


async def test_response_fields() -> None:
    body = {"prompt": "a", "n_predict": 1, "response_fields": ["content", "generation_settings/top_k", "nothing"]}
    async with api(FakeEngine()) as client:
        assert (await client.post("/completion", json=body)).json() == {
            "content": "Hello",
            "generation_settings/top_k": 40,
        }


async def test_tokenize_and_back() -> None:
    async with api(FakeEngine()) as client:
        text = "héllo\x00日本 <|im_end|>"
        ids = (await client.post("/tokenize", json={"content": text, "parse_special": False})).json()["tokens"]
        parsed = (await client.post("/tokenize", json={"content": text})).json()["tokens"]
        assert len(parsed) < len(ids)
        assert (await client.post("/detokenize", json={"tokens": ids})).json() == {"content": text}
        pieces = (await client.post("/tokenize", json={"content": "日", "with_pieces": True})).json()["tokens"]
        assert [piece["piece"] for piece in pieces] == [[0xE6], [0x97], [0xA5]]
        mixed = (await client.post("/tokenize", json={"content": [97, "b", 99]})).json()["tokens"]
        assert mixed == [97, 98, 99]
        long = (await client.post("/tokenize", json={"content": "a" * 10000})).json()["tokens"]
        assert (await client.post("/detokenize", json={"tokens": long})).json() == {"content": "a" * 10000}
        unsaid = dict.fromkeys(("add_special", "parse_special", "with_pieces"))
        assert (await client.post("/tokenize", json={"content": text, **unsaid})).json() == {"tokens": parsed}
        assert (await client.post("/tokenize", json={})).json() == {"tokens": []}
        assert (await client.post("/detokenize", json={})).json() == {"content": ""}


async def test_apply_template_takes_variables() -> None:
    template = "{{ messages[0].content }}|{{ mood }}|{{ add_generation_prompt }}"
    body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        "chat_template_kwargs": {"mood": "good"},
        "add_generation_prompt": False,
    }
    async with api(FakeEngine(template=template)) as client:
        assert (await client.post("/apply-template", json=body)).json() == {"prompt": "hi|good|False"}
        body["chat_template_kwargs"] = {"tools": []}
        refused = await client.post("/apply-template", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "chat_template_kwargs"


async def test_state_routes() -> None:
    async with api(FakeEngine()) as client:
        for path in ("/health", "/v1/health"):
            assert (await client.get(path)).json() == {"status": "ok"}
        for path in ("/v1/models", "/models"):
            (model,) = (await client.get(path)).json()["data"]
            assert (model["id"], model["object"]) == ("tiny", "model")
            assert model["meta"] == {
                "n_vocab": 288, "n_ctx": 64, "n_ctx_train": 2048, "n_embd": 64, "n_params": 1234, "size": 5678,
            }  # fmt: skip
        props = (await client.get("/props")).json()
        assert (props["total_slots"], props["model_alias"]) == (2, "tiny")
        assert props["default_generation_settings"]["n_ctx"] == 64
        assert props["default_generation_settings"]["params"]["temperature"] == 0.8
        assert "im_start" in props["chat_template"]


SETTINGS = (
    "seed temperature dynatemp_range dynatemp_exponent top_k top_p min_p top_n_sigma xtc_probability xtc_threshold "
    "typical_p repeat_last_n repeat_penalty presence_penalty frequency_penalty dry_multiplier dry_base "
    "dry_allowed_length dry_penalty_last_n dry_sequence_breakers mirostat mirostat_tau mirostat_eta adaptive_target "
    "adaptive_decay stop max_tokens n_predict n_keep n_discard ignore_eos stream logit_bias n_probs min_keep grammar "
    "grammar_lazy grammar_triggers preserved_tokens chat_format reasoning_format reasoning_in_content "
    "generation_prompt samplers speculative.types timings_per_token post_sampling_probs backend_sampling lora"
)
"""What llama-server writes of a request's settings."""


async def test_settings_have_all_that_llama_server_writes() -> None:
    body = {"prompt": "a", "n_predict": 1, "timings_per_token": True}
    async with api(FakeEngine()) as client:
        said = (await client.post("/completion", json=body)).json()["generation_settings"]
        props = (await client.get("/props")).json()["default_generation_settings"]["params"]
        busy = (await client.get("/slots")).json()[0]["params"]
    for settings in (said, props, busy):
        assert not set(SETTINGS.split()) - settings.keys()
    assert [settings["timings_per_token"] for settings in (said, props)] == [True, False]


async def test_slots() -> None:
    async with api(FakeEngine()) as client:
        busy, idle = (await client.get("/slots?fail_on_no_slot=1")).json()
    assert idle == {"id": 1, "n_ctx": 64, "speculative": False, "is_processing": False}
    assert (busy["id"], busy["id_task"], busy["is_processing"]) == (0, 7, True)
    assert (busy["n_prompt_tokens"], busy["n_prompt_tokens_cache"], busy["n_prompt_tokens_processed"]) == (10, 4, 6)
    assert busy["next_token"] == [{"has_next_token": True, "n_remain": 2, "n_decoded": 3}]


async def test_slots_all_busy_or_off() -> None:
    engine = FakeEngine()
    engine.stats = lambda: replace(STATS, lanes=STATS.lanes[:1])  # type: ignore[method-assign]
    async with api(engine) as client:
        assert (await client.get("/slots?fail_on_no_slot=1")).status_code == 503
        assert (await client.get("/slots")).status_code == 200
    async with api(FakeEngine(), slots=False) as client:
        response = await client.get("/slots")
        assert (response.status_code, response.json()["error"]["type"]) == (501, "not_supported_error")


async def test_metrics() -> None:
    async with api(FakeEngine(), metrics=True) as client:
        response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = response.text.splitlines()
    for line in (
        "llamacpp:prompt_tokens_total 90.0",
        "llamacpp:prompt_tokens_cached_total 10.0",
        "llamacpp:tokens_predicted_total 50.0",
        "llamacpp:n_decode_total 25.0",
        "llamacpp:prompt_tokens_seconds 45.0",
        "llamacpp:predicted_tokens_seconds 10.0",
        "llamacpp:requests_processing 1.0",
        "llamacpp:requests_deferred 3.0",
        "llamacpp:n_busy_slots_per_decode 2.0",
        'llamatrio:kv_cells{state="idle"} 60.0',
        "llamatrio:cache_saves_total 4.0",
        "llamatrio:preemptions_total 1.0",
        "llamatrio:cache_restore_seconds_total 0.0625",
        'llamatrio:cache_misses_total{reason="no entry"} 5.0',
        'llamatrio:inter_token_seconds_bucket{le="0.1"} 5.0',
        'llamatrio:inter_token_seconds_bucket{le="+Inf"} 6.0',
        "llamatrio:inter_token_seconds_sum 0.75",
        "llamatrio:cache_limit_bytes +Inf",
    ):
        assert line in lines
    assert "# TYPE llamacpp:prompt_tokens_total counter" in lines


async def test_metrics_are_off_by_default() -> None:
    async with api(FakeEngine()) as client:
        assert (await client.get("/metrics")).status_code == 501


async def test_api_prefix() -> None:
    async with api(FakeEngine(), api_prefix="/llm", api_keys=("k",)) as client:
        assert (await client.get("/llm/health")).status_code == 200
        assert (await client.get("/health")).status_code == 401
        assert (await client.get("/health", headers={"x-api-key": "k"})).status_code == 404
