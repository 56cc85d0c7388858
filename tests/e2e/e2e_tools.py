"""The real engine on tiny models, alone or behind the real server, and what tests ask of it.

Kernels are loaded once per process; after that a tiny model opens in some 20 ms. So every test has an engine of its
own, with the cells and the cache it wants, and no test sees what another one cached.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import trio

from llamatrio.engine.engine import Engine, open_engine
from llamatrio.engine.events import Finished
from llamatrio.engine.generation import Generation
from llamatrio.sched.sampler import Choice
from llamatrio.sched.sequence import Sequence as RunningSequence
from llamatrio.sched.types import Request, SamplingParams
from llamatrio.server.app import create_app
from llamatrio.server.settings import ServerConfig
from tests.server import http_tools
from tests.server.http_tools import Served, serving

MODELS = Path(__file__).parents[1] / "golden" / "models"
MODEL = MODELS / "tiny-qwen3-f16.gguf"
N_VOCAB = 288
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
FULL = SamplingParams(temperature=0.0, ignore_eos=True, n_probs=N_VOCAB)
"""Greedy, and the log probability of every token is reported: equal reports mean equal logits."""


def prompt(n: int, seed: int = 0) -> tuple[int, ...]:
    """n ids of the tiny vocabularies' bytes."""
    return tuple(np.random.default_rng(seed).integers(0, 256, n).tolist())


async def until(condition: Callable[[], Any]) -> None:
    """Polls for what has no event of its own; patient, since the machine may be busy."""
    await http_tools.until(condition, 30)


@dataclass
class Outcome:
    """A generation that was read to its end."""

    finished: Finished
    ids: list[int] = field(default_factory=list)
    text: str = ""
    probs: list[Choice] = field(default_factory=list)


async def read(generation: Generation) -> Outcome:
    """Reads a generation to its end."""
    ids: list[int] = []
    texts: list[str] = []
    probs: list[Choice] = []
    async for event in generation:
        if isinstance(event, Finished):
            return Outcome(event, ids, "".join(texts), probs)
        ids += event.ids
        texts.append(event.text)
        probs += event.probs
    raise AssertionError("a generation ended without its last event")


async def run(
    engine: Engine, tokens: Sequence[int], n: int, sampling: SamplingParams = GREEDY, **options: Any
) -> Outcome:
    """Runs one request for n tokens."""
    with engine.start(Request(tuple(tokens), sampling, max_tokens=n, **options)) as generation:
        return await read(generation)


async def run_all(
    engine: Engine, prompts: Sequence[Sequence[int]], n: int, sampling: SamplingParams = GREEDY
) -> list[Outcome]:
    """Starts all prompts at once, in their order, and reads them side by side."""
    outcomes: dict[int, Outcome] = {}

    async def read_one(i: int, generation: Generation) -> None:
        outcomes[i] = await read(generation)

    with ExitStack() as stack:
        requests = [Request(tuple(tokens), sampling, max_tokens=n) for tokens in prompts]
        generations = [stack.enter_context(engine.start(request)) for request in requests]
        async with trio.open_nursery() as nursery:
            for i, generation in enumerate(generations):
                nursery.start_soon(read_one, i, generation)
    return [outcomes[i] for i in range(len(prompts))]


def n_before_a_close_choice(outcome: Outcome) -> int:
    """How many tokens were chosen before the first whose runner-up was nearly as likely.

    Numbers of a token that is evaluated within a prompt and of one that is decoded agree to a few hundredths (where
    prompts use AMX; elsewhere they are equal), and so do those of two levels of processors.
    """
    close = [choice.top[0].logprob - choice.top[1].logprob < 0.15 for choice in outcome.probs]
    return close.index(True) if True in close else len(close)


async def settled(engine: Engine) -> None:
    """Waits until no save is under way and every lane is idle; then all books must agree."""
    await until(lambda: engine._cache.n_saving == 0 and not any(x.is_processing for x in engine.stats().lanes))
    engine._scheduler.check_invariants()


@asynccontextmanager
async def open_tiny(model: Path = MODEL, **options: Any) -> AsyncIterator[Engine]:
    """The real engine; two threads unless told otherwise."""
    async with open_engine(model, **{"n_threads": 2, "device": "cpu", **options}) as engine:
        yield engine


class Watched:
    """The engine as the server sees it, which remembers what was started, in order of arrival."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.started: list[RunningSequence] = []

    def start(self, request: Request) -> Generation:
        generation = self._engine.start(request)
        self.started.append(generation.seq)
        return generation

    @property
    def last_tokens(self) -> tuple[int, ...]:
        """The prompt of the latest request."""
        return self.started[-1].request.tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@dataclass
class Api:
    """A real server: its engine, and a client with one connection pool."""

    engine: Watched
    served: Served
    client: httpx.AsyncClient

    async def post(self, path: str, status: int = 200, /, **body: Any) -> Any:
        """Posts JSON; returns the answer's."""
        response = await self.client.post(path, json=body)
        assert response.status_code == status, response.text
        return response.json()

    async def complete(self, prompt: Any, n: int, **body: Any) -> dict[str, Any]:
        """A greedy /completion of n tokens."""
        answer: dict[str, Any] = await self.post("/completion", prompt=prompt, n_predict=n, **(_PLAIN | body))
        return answer

    async def stream(self, path: str, **body: Any) -> list[str]:
        """The data of all events of a streamed answer."""
        response = await self.client.post(path, json={**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return sse(response.text)

    async def metrics(self) -> dict[str, float]:
        """GET /metrics, by name."""
        text = (await self.client.get("/metrics")).text
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in lines}

    async def idle(self) -> None:
        """Waits until every slot is idle."""
        await until(lambda: not any(lane.is_processing for lane in self.engine.stats().lanes))


_PLAIN = {"temperature": 0, "ignore_eos": True, "return_tokens": True}


@asynccontextmanager
async def api(
    model: Path = MODEL, *, http2: bool = False, settings: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[Api]:
    """The real engine behind the real server on a free port."""
    async with open_tiny(model, **{"n_ctx": 1024, **options}) as engine:
        watched = Watched(engine)
        app = create_app(watched, ServerConfig(port=0, metrics=True, **(settings or {})))
        async with serving(app) as served, served.client(http2=http2) as client:
            yield Api(watched, served, client)


def sse(text: str) -> list[str]:
    """The data of all events of a stream."""
    events = [block.removeprefix("data: ") for block in text.split("\n\n") if block.startswith("data: ")]
    assert all("\n" not in event for event in events)
    return events


def joined(events: Sequence[str]) -> str:
    """The text that the events of a /completion stream make together."""
    return "".join(json.loads(event)["content"] for event in events)
