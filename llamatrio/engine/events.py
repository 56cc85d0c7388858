"""What a generation reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from llamatrio.sched.sampler import Choice
from llamatrio.sched.types import FinishReason


class TokenEvent(NamedTuple):
    """Tokens that were made. `text` may be empty: a character or a stop string may still be incomplete."""

    text: str
    ids: tuple[int, ...]
    probs: tuple[Choice, ...] = ()
    """One for each id, when the request asked for probabilities."""


Take = Callable[[TokenEvent, float], TokenEvent | None]
"""(event, now) -> what is left of it for the reader."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a generation stands. Times are in seconds."""

    n_prompt: int
    n_cached: int
    """Prompt tokens that were not evaluated because their KV was known."""
    n_predicted: int
    prompt_seconds: float
    """From the start on a lane to the first token."""
    predicted_seconds: float
    """From the first token on."""
    lane: int


@dataclass(frozen=True, slots=True)
class Finished(Progress):
    """The last event of a generation."""

    reason: FinishReason
    stopping_word: str
    seed: int
    error: str = ""
