"""Cases of text, tokens and bad input over HTTP, on the real engine: B22 B24 B28 B29 B31 B33 B49."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from e2e_tools import Api, api, joined, prompt

from llamatrio.model.bpe import byte_alphabet
from tests.helpers_gguf import spm_vocabulary, tiny_model, tiny_vocabulary

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi there"}], "temperature": 0}

# ---------------------------------------------------------------- B22: characters over tokens

GRIN, KANJI = "\U0001f600", "\u65e5"


def model_with_halves(path: Path) -> tuple[Path, list[str]]:
    """A model whose vocabulary spells GRIN by two tokens of 2 bytes and KANJI by tokens of 2 and 1; all its tokens."""
    keys, letters = tiny_vocabulary(), {byte: letter for letter, byte in byte_alphabet().items()}
    texts, kinds = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    halves = (GRIN.encode()[:2], GRIN.encode()[2:], KANJI.encode()[:2])
    for id, half in enumerate(halves, start=len(texts) - len(halves)):
        texts[id] = "".join(letters[byte] for byte in half)
        kinds[id] = 1
    return tiny_model(path / "halves.gguf", metadata=keys), texts


def forced(ids: list[int]) -> dict[str, Any]:
    """Sampling that makes the model say exactly these ids, each once: the bias falls, and what was said is barred."""
    bias = [[id, 1e6 - 1e4 * i] for i, id in enumerate(ids)]
    return {"logit_bias": bias, "presence_penalty": 1e7, "repeat_last_n": -1, "temperature": 0, "n_predict": len(ids)}


async def test_b22_a_character_split_over_tokens_comes_out_whole(tmp_path: Path) -> None:
    path, texts = model_with_halves(tmp_path)
    grin1, grin2, kanji1 = range(len(texts) - 3, len(texts))
    said = [grin1, grin2, texts.index("b"), kanji1, texts.index("\u00a5"), texts.index("c")]
    body = {"prompt": "x", **forced(said), "return_tokens": True}
    async with api(path) as server:
        whole = await server.post("/completion", **body)
        assert whole["tokens"] == said
        assert whole["content"] == f"{GRIN}b{KANJI}c"
        events = await server.stream("/completion", **body)
        assert joined(events) == f"{GRIN}b{KANJI}c"
        assert not any("\ufffd" in event for event in events)
        for n, text in ((1, "\ufffd"), (2, GRIN), (4, f"{GRIN}b\ufffd")):
            whole = await server.post("/completion", **(body | {"n_predict": n}))
            assert whole["content"] == text
            assert joined(await server.stream("/completion", **(body | {"n_predict": n}))) == text
        chat = {**HI, **forced(said), "max_tokens": len(said)}
        events = await server.stream(CHAT, **chat)
        deltas = [json.loads(event)["choices"][0]["delta"].get("content", "") for event in events[:-1]]
        assert "".join(deltas) == f"{GRIN}b{KANJI}c"
        assert all(len(delta) <= 1 for delta in deltas), "events came late"


# ---------------------------------------------------------------- B24: the usage chunk


@pytest.mark.parametrize("http2", [False, True], ids=["h1", "h2c"])
async def test_b24_usage_has_a_chunk_of_its_own_when_asked_for(http2: bool) -> None:
    body = {**HI, "max_tokens": 6}
    async with api(http2=http2) as server:
        await server.post(CHAT, **body)  # from now on the prompt is cached: the same numbers each time
        whole = await server.post(CHAT, **body)
        wanted = await server.stream(CHAT, **body, stream_options={"include_usage": True})
        assert wanted.count("[DONE]") == 1
        assert wanted[-1] == "[DONE]"
        *chunks, finish, usage = map(json.loads, wanted[:-1])
        assert (usage["choices"], finish["choices"][0]["finish_reason"]) == ([], "length")
        assert usage["usage"] == whole["usage"]
        assert all("usage" not in chunk or chunk["usage"] is None for chunk in [*chunks, finish])
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
        assert text == whole["choices"][0]["message"]["content"]
        for options in ({"include_usage": False}, None):
            events = await server.stream(CHAT, **body, stream_options=options)
            assert all(json.loads(event)["choices"] for event in events[:-1])
        ignored = await server.post(CHAT, **body, stream_options={"include_usage": True})
        assert ignored["usage"]["completion_tokens"] == 6


# ---------------------------------------------------------------- B28, B29, B31: tokens

WORDS = {"▁": -90.0, **{c: -100.0 - i for i, c in enumerate("texwos")}}
WORDS |= {"te": -1.0, "xt": -2.0, "text": -3.0, "▁text": -4.0, "▁t": -50.0, "▁▁": -60.0}


def scored_model(path: Path, **keys: Any) -> Path:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    metadata = spm_vocabulary(WORDS, **keys) | {"tokenizer.chat_template": template}
    return tiny_model(path / "scored.gguf", metadata=metadata)


@pytest.mark.parametrize("has_prefix", [True, False])
async def test_b28_text_comes_back_as_it_was(tmp_path: Path, has_prefix: bool) -> None:
    path = scored_model(tmp_path, add_space_prefix=has_prefix)
    async with api(path) as server:
        spelled = {}
        for text in ("", "text", " text", "<s>text</s>", "  two  spaces"):
            answer = await server.post("/tokenize", content=text, with_pieces=True)
            ids = [token["id"] for token in answer["tokens"]]
            assert (await server.post("/detokenize", tokens=ids)) == {"content": text}
            spelled[text] = [token["piece"] for token in answer["tokens"]]
        assert spelled["text"] == [" text" if has_prefix else "text"]
        assert spelled["<s>text</s>"] == ["<s>", " text" if has_prefix else "text", "</s>"]
        tokenizer = server.engine.model.tokenizer
        words = {tokenizer.token_text(id): id for id in range(tokenizer.n_vocab)}
        for word, text in (("text", "text"), ("▁text", " text")):
            body = {"prompt": "te", **forced([words[word], words["w"]])}
            assert joined(await server.stream("/completion", **body)) == text + "w"


async def prompt_of(server: Api, path: str, **body: Any) -> list[str]:
    """How the request's prompt was spelled in tokens."""
    await server.post(path, max_tokens=0, **body)
    return [server.engine.model.tokenizer.token_text(id) for id in server.engine.last_tokens]


async def test_b29_exactly_one_bos(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "text"}]}
    async with api(scored_model(tmp_path, add_bos_token=True, add_space_prefix=False)) as server:
        assert await prompt_of(server, CHAT, **chat) == ["<s>", "text"]
        assert await prompt_of(server, "/completion", prompt="text") == ["<s>", "text"]
        # The raw interface adds what the file says, also to a text that spells it out.
        assert await prompt_of(server, "/completion", prompt="<s>text") == ["<s>", "<s>", "text"]
    async with api(scored_model(tmp_path, add_bos_token=False, add_space_prefix=False)) as server:
        assert await prompt_of(server, CHAT, **chat) == ["<s>", "text"]
        assert await prompt_of(server, "/completion", prompt="text") == ["text"]


async def test_b29_no_bos_is_invented(tmp_path: Path) -> None:
    keys = {**spm_vocabulary(WORDS), "tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.add_space_prefix": False}
    async with api(tiny_model(tmp_path / "bare.gguf", metadata=keys)) as server:
        assert await prompt_of(server, "/completion", prompt="text") == ["text"]
        assert "<s>" not in await prompt_of(server, CHAT, messages=[{"role": "user", "content": "text"}])
    keys = tiny_vocabulary()
    del keys["tokenizer.ggml.add_bos_token"]
    async with api(tiny_model(tmp_path / "absent.gguf", metadata=keys)) as server:
        assert await prompt_of(server, "/completion", prompt="in") == ["in"]


@pytest.mark.parametrize(("pre", "pieces"), [("qwen2", ["2", "0", "2", "4"]), ("llama-bpe", ["202", "4"])])
async def test_b31_digits_are_grouped_as_the_file_says(tmp_path: Path, pre: str, pieces: list[str]) -> None:
    keys = tiny_vocabulary()
    keys["tokenizer.ggml.tokens"][-4:] = ["20", "202", "2024", "->"]
    keys["tokenizer.ggml.token_type"][-4:] = 1
    keys["tokenizer.ggml.merges"] = ["2 0", "20 2", "202 4", "- >"]
    async with api(tiny_model(tmp_path / "digits.gguf", metadata=keys | {"tokenizer.ggml.pre": pre})) as server:
        for text, expected in (("2024", pieces), ("->", ["->"])):
            tokens = (await server.post("/tokenize", content=text, with_pieces=True))["tokens"]
            assert [token["piece"] for token in tokens] == expected


# ---------------------------------------------------------------- B33, B49: bad input

BAD_BODIES = {
    "bad UTF-8": b'{"prompt": "a\xe6\xad", "messages": [{"role": "user", "content": "\xe6\xad"}]}',
    "UTF-16": json.dumps({"prompt": "a", **HI}).encode("utf-16"),
    "lone surrogate": rb'{"prompt": "a\ud83d", "messages": [{"role": "user", "content": "\ud83d"}]}',
}


@pytest.mark.parametrize("what", BAD_BODIES)
async def test_b33_bad_utf8_is_a_400_and_the_connection_goes_on(what: str) -> None:
    async with api() as server:
        ports = set()
        for path in (CHAT, "/completion", "/v1/completions"):
            for content, status in ((BAD_BODIES[what], 400), (b'{"prompt": "a", "max_tokens": 1}', 200)):
                if path == CHAT and status == 200:
                    content = json.dumps({**HI, "max_tokens": 1}).encode()
                response = await server.client.post(path, content=content)
                assert response.status_code == status
                answer = json.loads(response.content.decode("utf-8"))
                assert status == 200 or answer["error"]["type"] == "invalid_request_error"
                ports.add(response.extensions["network_stream"].get_extra_info("client_addr"))
        assert len(ports) == 1, "a connection was given up"


async def test_b33_nul_is_ordinary_text() -> None:
    async with api() as server:
        answer = await server.complete("a\0b", 1)
        assert (answer["prompt"], server.engine.last_tokens) == ("a\0b", (97, 0, 98))
        chat = await server.post(CHAT, messages=[{"role": "user", "content": "\0"}], max_tokens=1)
        assert chat["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("bad", [[-1], [288], [2**63], [1.5], [True], [[-1]], [5, [6]], [None], []], ids=str)
async def test_b49_ids_that_do_not_exist_are_refused(bad: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "llamatrio")
    async with api() as server:
        for path in ("/completion", "/v1/completions"):
            error = (await server.post(path, 400, prompt=bad, max_tokens=1))["error"]
            assert error["param"].startswith("prompt")
        if bad:
            error = (await server.post("/detokenize", 400, tokens=bad))["error"]
            assert error["param"].startswith("tokens")
        else:
            assert await server.post("/detokenize", tokens=bad) == {"content": ""}
        assert not server.engine.started
        mixed = await server.complete([97, "b", 99], 1)
        assert mixed["tokens_evaluated"] == 3
        assert server.engine.last_tokens == (97, 98, 99)
        assert (await server.complete(list(prompt(3)), 1))["tokens_predicted"] == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_over_the_limit_are_a_400_that_names_them(stream: bool) -> None:
    async with api() as server:
        for path, body in (("/completion", {"prompt": "a"}), (CHAT, HI)):
            answer = await server.post(path, 400, **body, stop=["ab"] * 5000, stream=stream)
            assert answer["error"]["param"] == "stop"
