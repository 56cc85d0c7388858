"""The engine for programs that do not run Trio."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trio

from llamatrio.config import EngineConfig
from llamatrio.engine.engine import open_engine


def generate(
    model: str | Path, prompt: str | Sequence[int], *, config: EngineConfig | None = None, **options: Any
) -> str:
    """Opens a model, continues one prompt, and returns the text. Blocks; not for use inside an event loop.

    options are those of `Engine.generate`. Raises what `open_engine` and `Engine.generate` raise.
    """

    async def run() -> str:
        async with open_engine(model, config) as engine:
            return "".join([piece async for piece in engine.generate(prompt, **options)])

    return trio.run(run)
