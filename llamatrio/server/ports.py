"""What the HTTP side needs of an engine. `llamatrio.engine` has the real one; tests bring their own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

from llamatrio.config import EngineConfig
from llamatrio.engine.events import Finished, Progress, Take, TokenEvent
from llamatrio.engine.stats import EngineStats
from llamatrio.model.chat import ChatTemplate
from llamatrio.model.spec import ModelSpec
from llamatrio.model.tokenizer import Tokenizer
from llamatrio.sched.types import Request


class Model(Protocol):
    """The model that is served."""

    @property
    def spec(self) -> ModelSpec: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def chat_template(self) -> ChatTemplate: ...
    @property
    def name(self) -> str: ...
    @property
    def path(self) -> Any: ...
    @property
    def n_params(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...


class Generation(AbstractContextManager["Generation"], Protocol):
    """One request under way. Leaving it early cancels it, synchronously."""

    def __aiter__(self) -> AsyncIterator[TokenEvent | Finished]: ...
    def progress(self) -> Progress: ...
    def divert(self, take: Take | None) -> None:
        """Offers tokens to `take` first, while a reader waits for them."""
        ...


class Engine(Protocol):
    """The engine, as the routes see it."""

    @property
    def config(self) -> EngineConfig: ...
    @property
    def model(self) -> Model: ...
    @property
    def n_ctx_seq(self) -> int:
        """Tokens that one sequence may hold."""
        ...

    def start(self, request: Request) -> Generation:
        """Queues a request. Raises ContextOverflowError, RequestError or OverloadedError before it is queued."""
        ...

    def stats(self) -> EngineStats: ...
