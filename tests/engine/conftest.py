"""An engine on the fake device, with everything inline and a virtual clock."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from llamatrio.engine.engine import Engine, open_engine
from llamatrio.model.spec import ModelSpec
from tests.fakes import EOG, SPEC, FakeBackend


class FakeTokenizer:
    """Token i is spelled as the letter at i; token 0 ends a text."""

    eog_ids = frozenset({EOG})

    def piece(self, token: int, *, special: bool = False) -> bytes:
        return bytes([40 + token])

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return [ord(c) - 40 for c in text]


@dataclass
class FakeModel:
    tokenizer: FakeTokenizer
    spec: ModelSpec = SPEC
    path: Path = Path("fake.gguf")


async def inline(work: Callable[..., Any], *args: Any) -> Any:
    return work(*args)


@asynccontextmanager
async def _open(backend: FakeBackend, **options: Any) -> AsyncIterator[Engine]:
    model: Any = FakeModel(FakeTokenizer())
    async with open_engine(model, backend=backend, run_blocking=inline, run_copy=inline, **options) as engine:
        yield engine


@pytest.fixture
def open_fake() -> Callable[..., AbstractAsyncContextManager[Engine]]:
    return _open
