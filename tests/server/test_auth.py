"""API keys, cache scopes, and cross-origin calls."""

from __future__ import annotations

import inspect

import pytest
import trio
from fake_engine import FakeEngine, api
from http_tools import open_stream, serving

from llamatrio.config import EngineConfig
from llamatrio.server import auth
from llamatrio.server.app import create_app
from llamatrio.server.auth import KeyRing, scope_of
from llamatrio.server.settings import CorsConfig, ServerConfig

KEYS = ("first-key", "zweiter-schlüssel", "third")
ASK = {"prompt": "a", "n_predict": 1}


@pytest.mark.parametrize("key", KEYS)
async def test_each_key_opens(key: str) -> None:
    async with api(FakeEngine(), api_keys=KEYS) as client:
        for header in (b"authorization", b"x-api-key"):
            for scheme in (b"", b"Bearer ", b"bearer ", b"Bearer  "):
                headers = {header: scheme + key.encode()}
                assert (await client.post("/completion", json=ASK, headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "header",
    [
        None,
        b"",
        b"Bearer",
        b"Bearer first-ke",
        b"Bearer first-key2",
        b"Bearer FIRST-KEY",
        b"Basic first-key",
        b"Bearer Bearer first-key",
        b"first-key2",
        b"Bearer \xff\xfe\xe9",
        b"Bearer " + "zweiter-schlüssel".encode("latin-1"),
        b"Bearer " + b"x" * 8000,
    ],
)
async def test_anything_else_is_401(header: bytes | None) -> None:
    engine = FakeEngine()
    async with api(engine, api_keys=KEYS) as client:
        headers = {} if header is None else {b"authorization": header}
        response = await client.post("/completion", json=ASK, headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["type"] == "authentication_error"
        assert response.headers["www-authenticate"] == "Bearer"
        assert (await client.get("/nothing", headers=headers)).status_code == 401
    assert engine.requests == []


async def test_public_routes_need_no_key() -> None:
    async with api(FakeEngine(), api_keys=KEYS, metrics=True) as client:
        for path in ("/health", "/v1/health", "/v1/models", "/models"):
            assert (await client.get(path)).status_code == 200
        for path in ("/props", "/slots", "/metrics"):
            assert (await client.get(path)).status_code == 401


async def test_401_comes_before_the_body() -> None:
    app = create_app(FakeEngine(), ServerConfig(api_keys=KEYS))
    async with serving(app) as served:
        stream, _ = await open_stream(served, "http/1.1")
        await stream.send_all(b"POST /completion HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n{")
        with trio.fail_after(1):
            assert (await stream.receive_some(1000)).startswith(b"HTTP/1.1 401")


async def test_oversized_header_is_431() -> None:
    async with api(FakeEngine(), api_keys=KEYS) as client:
        response = await client.get("/props", headers={"authorization": "Bearer " + "x" * 70_000})
        assert response.status_code == 431


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    real = auth.hmac.compare_digest
    monkeypatch.setattr(auth.hmac, "compare_digest", lambda a, b: compared.append(a) or real(a, b))
    assert KeyRing(KEYS).scope_of([b"first-key"]) == scope_of("first-key")
    assert len(compared) == len(KEYS)
    assert "==" not in inspect.getsource(KeyRing.scope_of)


def test_scopes_tell_keys_apart_and_do_not_tell_them() -> None:
    scopes = {scope_of(key, salt) for key in KEYS for salt in (b"", b"salt")}
    assert len(scopes) == 6
    assert all(key not in scope for scope in scopes for key in KEYS)
    assert scope_of("a", b"salt") == scope_of("a", b"salt")


async def test_requests_carry_the_scope_of_their_key() -> None:
    engine = FakeEngine()
    async with api(engine, api_keys=KEYS) as client:
        for key in ("first-key", "third"):
            await client.post("/completion", json=ASK, headers={"x-api-key": key})
    assert [request.scope for request in engine.requests] == [scope_of("first-key"), scope_of("third")]


async def test_scope_all_shares_the_cache() -> None:
    engine = FakeEngine(config=EngineConfig(cache_scope="all"))
    async with api(engine, api_keys=KEYS) as client:
        await client.post("/completion", json=ASK, headers={"x-api-key": "third"})
    assert engine.requests[0].scope == ""


async def test_preflight_needs_no_key() -> None:
    headers = {
        "origin": "https://chat.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    async with api(FakeEngine(), api_keys=KEYS) as client:
        response = await client.options("/v1/chat/completions", headers=headers)
        assert response.status_code == 204
        assert response.headers["access-control-allow-origin"] == "*"
        assert "POST" in response.headers["access-control-allow-methods"]
        assert response.headers["access-control-allow-headers"] == "authorization,content-type"
        assert "access-control-allow-credentials" not in response.headers
        refused = await client.post("/v1/chat/completions", json={}, headers={"origin": "https://chat.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "*"
        missing = await client.get("/nothing", headers={"origin": "https://chat.example", "x-api-key": "third"})
        assert (missing.status_code, missing.headers["access-control-allow-origin"]) == (404, "*")


async def test_star_never_stands_beside_credentials() -> None:
    async with api(FakeEngine(), cors=CorsConfig(credentials=True)) as client:
        response = await client.get("/health", headers={"origin": "https://chat.example"})
        assert response.headers["access-control-allow-origin"] == "https://chat.example"
        assert response.headers["access-control-allow-credentials"] == "true"
        assert response.headers["vary"] == "Origin"


async def test_other_origins_are_not_allowed() -> None:
    async with api(FakeEngine(), cors=CorsConfig(origins=("https://good.example",))) as client:
        good = await client.get("/health", headers={"origin": "https://good.example"})
        bad = await client.get("/health", headers={"origin": "https://bad.example"})
        none = await client.get("/health")
    assert good.headers["access-control-allow-origin"] == "https://good.example"
    assert "access-control-allow-origin" not in bad.headers
    assert "access-control-allow-origin" not in none.headers
