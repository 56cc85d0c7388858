"""Configuration values, and the only place that reads the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Literal

MIB = 1 << 20

KVType = Literal["f16", "q8_0"]
"""How K or V is kept in the cells."""

_LEAST = {
    "n_ctx": 0, "n_parallel": 1, "n_batch": 1, "n_ubatch": 1, "n_threads": 0, "cache_ram_mib": -1, "max_queued": 1,
    "staging_mib": 1, "n_staging": 1,
}  # fmt: skip
_OPTIONS = {
    "type_k": ("f16", "q8_0"), "type_v": ("f16", "q8_0"), "device": ("auto", "cpu", "cuda"),
    "cache_scope": ("key", "all"),
}  # fmt: skip
_LONGEST = 1e9
"""Of times: what is computed from them stays finite."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How an engine runs. Names and meanings follow llama-server's flags."""

    n_ctx: int = 0
    """Cells in the KV pool; 0 takes the model's training context."""
    n_parallel: int = 4
    """Sequences that run at once (llama-server's slots)."""
    kv_unified: bool = True
    """All sequences share the pool; otherwise each may hold n_ctx // n_parallel tokens."""
    type_k: KVType = "f16"
    type_v: KVType = "f16"
    n_batch: int = 2048
    """Most rows in one step; never fewer than a piece of a prompt (64) beside all streams."""
    n_ubatch: int = 512
    """Most prompt rows in one step; at least 64."""
    n_threads: int = 0
    """CPU threads for the step; 0 takes the cores this process may use."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    n_gpu_layers: int = 99
    cache_ram_mib: int = 8192
    """Byte budget of the prompt cache in host memory; 0 turns it off, -1 means no limit."""
    chat_template: str | None = None
    """A Jinja template, or `chatml`; None takes the file's own."""
    cache_idle_slots: bool = True
    """Save a sequence to the prompt cache as soon as it turns idle."""
    cache_scope: Literal["key", "all"] = "key"
    """Whether clients with different API keys may share cached prefixes."""
    target_itl_ms: float = 50.0
    """Prompt pieces are sized so that a step which also decodes takes about this long."""
    max_queued: int = 1024
    """Requests that may wait; more are refused with 503."""
    stream_stall_timeout: float = 60.0
    """A stream whose reader takes nothing for this many seconds is cancelled."""
    staging_mib: int = 32
    """Size of one staging buffer."""
    n_staging: int = 2
    seed: int | None = None
    """Default seed of requests that name none; None draws a fresh one for each."""

    def n_ctx_seq(self, n_cells: int) -> int:
        """Most tokens that a sequence may hold of a pool of `n_cells`. Raises ValueError where that is no context."""
        n = n_cells if self.kv_unified else n_cells // self.n_parallel
        if n < 2:
            shared = "" if self.kv_unified else f" (n_ctx {n_cells} shared by n_parallel {self.n_parallel})"
            raise ValueError(f"expected a context of 2 tokens for each sequence at least, not {n}{shared}")
        return n

    def __post_init__(self) -> None:
        """Raises ValueError naming the field that makes no sense."""
        for name, low in _LEAST.items():
            value = getattr(self, name)
            if not _is_a(Integral, value) or value < low:
                raise ValueError(f"expected {name} >= {low}, a whole number, not {value!r}")
        for name in ("target_itl_ms", "stream_stall_timeout"):
            value = getattr(self, name)
            if not _is_a(Real, value) or not 0 < value <= _LONGEST:
                raise ValueError(f"expected {name} above 0 and up to {_LONGEST:g}, not {value!r}")
        for name, options in _OPTIONS.items():
            if getattr(self, name) not in options:
                raise ValueError(f"expected {name} to be {' or '.join(options)}, not {getattr(self, name)!r}")
        if self.seed is not None and (not _is_a(Integral, self.seed) or self.seed < 0):
            raise ValueError(f"expected seed >= 0, a whole number, or None, not {self.seed!r}")
        if self.n_ctx:
            self.n_ctx_seq(self.n_ctx)

    @property
    def cache_bytes(self) -> int | None:
        """The prompt cache's budget in bytes; None means no limit."""
        return None if self.cache_ram_mib < 0 else self.cache_ram_mib * MIB


def _is_a(kind: type, value: object) -> bool:
    """Whether it is such a number; True and False are none."""
    return isinstance(value, kind) and not isinstance(value, bool)


def environment() -> Mapping[str, str]:
    """The environment as it is, for the command line: llama-server's LLAMA_ARG_* stand for flags."""
    return os.environ


def cpu_level() -> str | None:
    """LLAMATRIO_CPU_LEVEL: force the CPU kernels to plain, avx2, avx512 or amx; None lets the backend choose."""
    return os.environ.get("LLAMATRIO_CPU_LEVEL") or None


def cache_dir() -> Path:
    """Where compiled kernels and fetched models live: LLAMATRIO_CACHE, else the user's cache folder."""
    named = os.environ.get("LLAMATRIO_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llamatrio"


def n_usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
