"""`samplers` switches parts of the chain off, and never turns it round."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fake_engine import FakeEngine, api

from llamatrio.errors import RequestError
from llamatrio.sched.types import SamplingParams
from llamatrio.server.samplers import with_samplers

ALL_ON = SamplingParams(
    temperature=0.5, top_k=7, top_p=0.8, min_p=0.1, repeat_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.3
)
NO_PENALTIES: dict[str, Any] = {"repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


@pytest.mark.parametrize(
    ("wanted", "off"),
    [
        (["penalties", "top_k", "top_p", "min_p", "temperature"], {}),
        (["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"], {}),
        ("edskypmxt", {}),
        (["penalties", "top_k", "temp"], {"top_p": 1.0, "min_p": 0.0}),
        (["top-k", "nucleus", "min-p", "temperature"], NO_PENALTIES),
        ("kt", {**NO_PENALTIES, "top_p": 1.0, "min_p": 0.0}),
        ([], {**NO_PENALTIES, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}),
    ],
)
def test_what_is_not_named_is_off(wanted: str | list[str], off: dict[str, Any]) -> None:
    assert with_samplers(ALL_ON, wanted) == replace(ALL_ON, **off)


@pytest.mark.parametrize("wanted", [["temperature", "top_k"], ["top_k", "top_k"], ["mirostat"], "kz", [""]])
async def test_what_the_chain_cannot_follow_is_refused(wanted: str | list[str]) -> None:
    with pytest.raises(RequestError, match="samplers"):
        with_samplers(ALL_ON, wanted)
    async with api(FakeEngine()) as client:
        response = await client.post("/completion", json={"prompt": "a", "samplers": wanted})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "samplers")


async def test_a_requests_samplers() -> None:
    engine = FakeEngine()
    async with api(engine) as client:
        body = {"prompt": "a", "n_predict": 1, "top_k": 5, "top_p": 0.5, "samplers": ["top_k", "temperature"]}
        assert (await client.post("/completion", json=body)).status_code == 200
    sampling = engine.requests[0].sampling
    assert (sampling.top_k, sampling.top_p, sampling.min_p) == (5, 1.0, 0.0)
