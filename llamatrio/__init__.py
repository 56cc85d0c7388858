"""llamatrio: an LLM server for GGUF models on Trio.

    async with llamatrio.open_engine("model.gguf", n_ctx=8192, n_parallel=8) as engine:
        async for piece in engine.generate("Once upon a time", max_tokens=64):
            print(piece, end="")

For scripts without Trio there is `llamatrio.generate(...)`, for evaluation `llamatrio.logits(...)`. Importing the
package is light: engine, compiler and server are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from llamatrio import errors
from llamatrio.config import EngineConfig
from llamatrio.errors import LlamatrioError
from llamatrio.version import __version__

if TYPE_CHECKING:
    from llamatrio.engine.engine import Engine, open_engine
    from llamatrio.engine.events import Finished, TokenEvent
    from llamatrio.engine.scripts import generate
    from llamatrio.evaluate import logits
    from llamatrio.sched.types import Request, SamplingParams

__all__ = [
    "Engine",
    "EngineConfig",
    "Finished",
    "LlamatrioError",
    "Request",
    "SamplingParams",
    "TokenEvent",
    "__version__",
    "errors",
    "generate",
    "logits",
    "open_engine",
]

_HOMES = {
    "Engine": "llamatrio.engine.engine",
    "open_engine": "llamatrio.engine.engine",
    "Finished": "llamatrio.engine.events",
    "TokenEvent": "llamatrio.engine.events",
    "generate": "llamatrio.engine.scripts",
    "logits": "llamatrio.evaluate",
    "Request": "llamatrio.sched.types",
    "SamplingParams": "llamatrio.sched.types",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'llamatrio' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return __all__
