"""An engine without a model: it says what it is told to, and remembers what it was asked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import trio
from http_tools import serving

from llamatrio.config import EngineConfig
from llamatrio.engine.events import Finished, TokenEvent
from llamatrio.engine.stats import EngineStats, Histogram, LaneStats
from llamatrio.errors import ContextOverflowError, LlamatrioError
from llamatrio.model.chat import ChatTemplate, load_template
from llamatrio.model.gguf import open_gguf
from llamatrio.model.spec import ModelSpec, RopeSpec
from llamatrio.model.tokenizer import Tokenizer, load_tokenizer
from llamatrio.sched.sampler import Choice
from llamatrio.sched.types import FinishReason, Request, TokenProb
from llamatrio.server.app import create_app
from llamatrio.server.settings import ServerConfig

TINY = Path(__file__).parent.parent / "golden" / "models" / "tiny-llama-f16.gguf"


SPEC = ModelSpec(
    arch="llama", name="tiny", n_vocab=288, n_ctx_train=2048, n_embd=64, n_layer=2, n_head=4, n_head_kv=2,
    head_dim=16, n_ff=128, norm_eps=1e-5, rope=RopeSpec(16, "norm", 10000.0), activation="silu", attn_scale=0.25,
)  # fmt: skip


STATS = EngineStats(
    lanes=(LaneStats(0, True, 7, 64, 10, 4, 3, Request(tokens=(1,), max_tokens=5)), LaneStats(1, n_ctx=64)),
    n_waiting=3, cells_total=1024, cells_used=100, cells_idle=60, cells_pinned=7, cache_bytes=4096, cache_entries=2,
    cache_limit_bytes=None, prompt_tokens=90, cached_tokens=10, prompt_seconds=2.0, predicted_tokens=50,
    predicted_seconds=5.0, n_decode_steps=25, n_tokens_max=33, n_preempted=1, saves=4, save_bytes=2048,
    save_seconds=0.125, restores=1, restore_bytes=512, restore_seconds=0.0625, hits=6,
    misses={"no entry": 5, "evicted": 2}, itl=Histogram((0.01, 0.1), (3, 2, 1), 0.75),
    ttft=Histogram((1.0,), (1, 1), 2.5),
)  # fmt: skip


@dataclass(frozen=True)
class FakeModel:
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    name: str = "tiny"
    path: Path = TINY
    n_params: int = 1234
    size_bytes: int = 5678
    spec: ModelSpec = SPEC


@cache
def load_fake_model(template: str | None = None) -> FakeModel:
    """The tiny model's real tokenizer, with its own template or another."""
    with open_gguf(TINY) as file:
        tokenizer = load_tokenizer(file.metadata)
        own = load_template(file.metadata, tokenizer)
    return FakeModel(tokenizer, own if template is None else ChatTemplate(template))


class FakeGeneration:
    """Cycles through the engine's pieces until a limit, a stop string, or the engine's own end."""

    def __init__(self, engine: FakeEngine, request: Request) -> None:
        self.engine = engine
        self.request = request
        self.n = 0
        self.is_over = False
        self.finished: Finished | None = None
        self.take: Any = None

    def __enter__(self) -> FakeGeneration:
        self.engine.running.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.running.remove(self)
        if self.finished is None:
            self.engine.cancelled.append(self.request)

    def divert(self, take: Any) -> None:
        self.take = take

    def progress(self) -> Finished:
        return self._finish("length")

    def __aiter__(self) -> FakeGeneration:
        return self

    async def __anext__(self) -> Any:
        if self.finished is not None:
            raise StopAsyncIteration
        while True:
            if self.engine.pause:
                await trio.sleep(self.engine.pause)
            else:
                await trio.lowlevel.checkpoint()
            self.finished = self._end()
            if self.finished is not None:
                return self.finished
            event = self._event()
            rest = event if self.take is None else self.take(event, trio.current_time())
            if rest is not None:
                return rest

    def _end(self) -> Finished | None:
        limit = self.request.max_tokens
        room = self.engine.n_ctx_seq - len(self.request.tokens)
        if self.n == self.engine.fails_after:
            return self._finish("error", error="the device fell off the bus")
        if self.n >= (room if limit < 0 else min(limit, room)):
            return self._finish("length")
        if self.n == self.engine.ends_after and not self.request.sampling.ignore_eos:
            return self._finish("stop")
        for word in self.request.stop:
            if word in self.engine.pieces[self.n % len(self.engine.pieces)]:
                return self._finish("word", word)
        return None

    def _finish(self, reason: FinishReason, word: str = "", error: str = "") -> Finished:
        n_prompt = len(self.request.tokens)
        return Finished(
            n_prompt=n_prompt,
            n_cached=n_prompt // 2,
            n_predicted=self.n,
            prompt_seconds=0.5,
            predicted_seconds=0.25,
            lane=1,
            reason=reason,
            stopping_word=word,
            seed=42,
            error=error,
        )

    def _event(self) -> TokenEvent:
        text, id = self.engine.pieces[self.n % len(self.engine.pieces)], 97 + self.n % 26
        self.n += 1
        self.engine.produced += 1
        n_probs = self.request.sampling.n_probs
        top = tuple(TokenProb(id + i, -0.5 - i) for i in range(n_probs))
        return TokenEvent(text, (id,), (Choice(id, -0.5, top),) if n_probs else ())


class FakeEngine:
    """See FakeGeneration."""

    def __init__(self, *pieces: str, template: str | None = None, config: EngineConfig | None = None) -> None:
        self.pieces = pieces or ("Hello", ",", " world", "!")
        self.config = config or EngineConfig(n_parallel=2)
        self.model = load_fake_model(template)
        self.n_ctx_seq = 64
        self.pause = 0.0
        self.ends_after: int | None = None
        self.fails_after: int | None = None
        self.refuses: LlamatrioError | None = None
        self.requests: list[Request] = []
        self.running: list[FakeGeneration] = []
        self.cancelled: list[Request] = []
        self.produced = 0

    def start(self, request: Request) -> FakeGeneration:
        if self.refuses is not None:
            raise self.refuses
        if len(request.tokens) >= self.n_ctx_seq:
            raise ContextOverflowError(len(request.tokens), self.n_ctx_seq)
        self.requests.append(request)
        return FakeGeneration(self, request)

    def stats(self) -> EngineStats:
        return STATS


@asynccontextmanager
async def api(engine: FakeEngine, *, http2: bool = False, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of `engine`'s API over a real socket."""
    app = create_app(engine, ServerConfig(**{**settings, "port": 0}))
    async with serving(app) as served, served.client(http2=http2) as client:
        yield client


def sse(text: str) -> list[str]:
    """The data of all events."""
    events = [block.removeprefix("data: ") for block in text.split("\n\n") if block.startswith("data: ")]
    assert all("\n" not in event for event in events)
    return events
