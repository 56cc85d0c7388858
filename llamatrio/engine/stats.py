"""Counters of an engine, and the snapshot that /metrics and /slots show."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from llamatrio.sched.types import Request

ITL_BOUNDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
TTFT_BOUNDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class Histogram(NamedTuple):
    """`counts[i]` values lie in (bounds[i - 1], bounds[i]]; the last count has those above every bound."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float


class Observations:
    """A histogram in the making."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """Counts one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def snapshot(self) -> Histogram:
        """The counts so far."""
        return Histogram(self._bounds, tuple(self._counts), self._sum)


@dataclass(frozen=True, slots=True)
class LaneStats:
    """One lane: what llama-server's clients know as a slot."""

    lane: int
    is_processing: bool = False
    id: int = -1
    n_ctx: int = 0
    n_prompt: int = 0
    n_cached: int = 0
    n_decoded: int = 0
    params: Request | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot. Counters never fall; times are in seconds."""

    lanes: tuple[LaneStats, ...]
    n_waiting: int
    cells_total: int
    cells_used: int
    cells_idle: int
    cells_pinned: int
    cache_bytes: int
    cache_entries: int
    cache_limit_bytes: int | None
    prompt_tokens: int
    cached_tokens: int
    prompt_seconds: float
    predicted_tokens: int
    predicted_seconds: float
    n_decode_steps: int
    n_tokens_max: int
    n_preempted: int
    saves: int
    save_bytes: int
    save_seconds: float
    restores: int
    restore_bytes: int
    restore_seconds: float
    hits: int
    misses: Mapping[str, int]
    itl: Histogram
    ttft: Histogram


@dataclass(slots=True)
class Totals:
    """What the engine itself counts. Owned by the decode task; the saver adds its seconds."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_seconds: float = 0.0
    predicted_tokens: int = 0
    predicted_seconds: float = 0.0
    n_tokens_max: int = 0
    save_seconds: float = 0.0
    restore_seconds: float = 0.0
    itl: Observations = field(default_factory=lambda: Observations(ITL_BOUNDS))
    ttft: Observations = field(default_factory=lambda: Observations(TTFT_BOUNDS))
