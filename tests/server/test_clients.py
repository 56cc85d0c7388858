"""The clients that people use, over real sockets."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
import trio
from fake_engine import FakeEngine
from http_tools import CERT, Served, serving

from llamatrio.server.app import create_app
from llamatrio.server.settings import ServerConfig

# The openai package leaves its own generators unfinished after [DONE].
pytestmark = [
    pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

KEY = "secret"
MESSAGES: Any = [{"role": "user", "content": "hi"}]


def app_of(engine: FakeEngine) -> Any:
    return create_app(engine, ServerConfig(api_keys=(KEY,)))


def sync_session(served: Served, http2: bool) -> dict[str, Any]:
    """What a script does with the openai package."""
    transport = httpx.Client(http1=not http2, http2=http2, verify=CERT if served.tls else True)
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEY, http_client=transport, max_retries=0) as client:
        (model,) = client.models.list().data
        whole = client.chat.completions.create(
            model=model.id, messages=MESSAGES, max_tokens=4, logprobs=True, top_logprobs=2
        )
        stream = client.chat.completions.create(
            model=model.id, messages=MESSAGES, max_tokens=4, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        text = client.completions.create(model=model.id, prompt="hi", max_tokens=2)
        with pytest.raises(openai.BadRequestError) as refusal:
            client.chat.completions.create(model=model.id, messages=MESSAGES, n=2)
    with (
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.chat.completions.create(model="x", messages=MESSAGES)
    return {"whole": whole, "chunks": chunks, "text": text, "refusal": refusal.value}


@pytest.mark.parametrize("http2", [False, True], ids=["h1", "h2c"])
async def test_openai_sync(http2: bool) -> None:
    async with serving(app_of(FakeEngine())) as served:
        got = await trio.to_thread.run_sync(sync_session, served, http2)
    (choice,) = got["whole"].choices
    assert (choice.message.content, choice.finish_reason) == ("Hello, world!", "length")
    assert choice.logprobs.content[0].top_logprobs[1].logprob == -1.5
    assert "".join(c.choices[0].delta.content or "" for c in got["chunks"] if c.choices) == "Hello, world!"
    assert got["chunks"][-1].usage == got["whole"].usage
    assert got["whole"].usage.prompt_tokens_details.cached_tokens > 0
    assert got["text"].choices[0].text == "Hello,"
    assert (got["refusal"].param, got["refusal"].type) == ("n", "invalid_request_error")


async def test_openai_async_on_trio() -> None:
    engine = FakeEngine()
    engine.pause = 0.005
    async with serving(app_of(engine)) as served:
        client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=KEY, http_client=served.client())
        texts: dict[int, str] = {}

        async def chat(i: int) -> None:
            stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=4, stream=True)
            texts[i] = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        async with trio.open_nursery() as nursery:
            for i in range(6):
                nursery.start_soon(chat, i)
        await client.close()
    assert texts == dict.fromkeys(range(6), "Hello, world!")


async def test_openai_over_tls_and_http2() -> None:
    async with serving(app_of(FakeEngine()), tls=True) as served:
        client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=KEY, http_client=served.client(http2=True))
        answer = await client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1)
        await client.close()
    assert answer.choices[0].message.content == "Hello"


async def test_openai_sees_a_failure_in_mid_stream() -> None:
    engine = FakeEngine()
    engine.fails_after = 2
    async with serving(app_of(engine)) as served:
        client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=KEY, http_client=served.client())
        got = []
        stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        try:
            async for chunk in stream:
                got.append(chunk)
        except openai.APIError as error:
            failure = error
        await client.close()
    assert "fell off the bus" in str(failure)
    assert len(got) == 3


@pytest.mark.parametrize("http2", [False, True], ids=["h1", "h2c"])
async def test_events_are_not_held_back(http2: bool) -> None:
    engine = FakeEngine("x")
    engine.pause = 0.03
    headers = {"authorization": f"Bearer {KEY}"}
    body = {"prompt": "a", "n_predict": 5, "stream": True}
    arrived: list[float] = []
    async with serving(app_of(engine)) as served, served.client(http2=http2, headers=headers) as client:
        response = await client.send(client.build_request("POST", "/completion", json=body), stream=True)
        async for chunk in response.aiter_raw():
            if b"data: " in chunk:
                arrived.append(trio.current_time())
    # One chunk for each token, spread over the time that the tokens take.
    assert len(arrived) >= 6
    assert arrived[-1] - arrived[0] > 0.1
