"""The values that pass between the API, the scheduler and the backends."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamatrio.kv.cells import Int32Array as Int32Array

FloatArray = NDArray[np.float32]

FinishReason = Literal["stop", "word", "length", "cancelled", "error"]
"""stop: an end-of-generation token. word: a stop string. length: a limit of tokens or of context. error: its step
failed, or no token may follow."""

PIECE = 64
"""Prompts are cut at multiples of this many positions."""
LARGEST = 1e9
"""Of any number that changes logits: sums and products of these stay finite."""


def least_rows(n_parallel: int) -> int:
    """Rows that a step must be able to take: with less room than a piece beside all streams no prompt would start."""
    return PIECE + n_parallel


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Names, defaults and order as in llama-server.

    Order: logit_bias, penalties, bans, top_k, top_p, min_p, temperature. Temperature 0 (or below) is greedy.
    """

    temperature: float = 0.8
    top_k: int = 40
    """Keep the k likeliest; 0 or below keeps all."""
    top_p: float = 0.95
    min_p: float = 0.05
    seed: int | None = None
    """None: a fresh random seed, reported with the result."""
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    """Window of the penalties, over prompt and output; 0 disables, -1 is the whole context."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, bias); -inf bans the token, whatever else is said of it. What is named twice gets the sum."""
    ignore_eos: bool = False
    min_tokens: int = 0
    """End-of-generation tokens are banned before this many tokens were made."""
    n_probs: int = 0
    """Report this many of the likeliest tokens with each token."""
    post_sampling_probs: bool = False
    """Report the probabilities after the sampling chain instead of the model's own."""

    def __post_init__(self) -> None:
        """Raises ValueError for what could make a NaN of a logit."""
        for name in ("temperature", "top_p", "min_p", "repeat_penalty", "presence_penalty", "frequency_penalty"):
            if not abs(getattr(self, name)) <= LARGEST:
                raise ValueError(f"expected {name} from {-LARGEST:g} to {LARGEST:g}, not {getattr(self, name)}")
        if self.repeat_penalty < 1 / LARGEST:
            raise ValueError(f"expected repeat_penalty from {1 / LARGEST:g} on, not {self.repeat_penalty}")
        if self.seed is not None and not isinstance(self.seed, int):
            raise ValueError(f"expected seed to be an integer, not {self.seed!r}")
        if bad := [bias for _, bias in self.logit_bias if not (abs(bias) <= LARGEST or bias == -math.inf)]:
            raise ValueError(f"expected logit_bias from {-LARGEST:g} to {LARGEST:g}, or -inf, not {bad[0]}")


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What a client wants: one prompt, one continuation. Frozen."""

    tokens: tuple[int, ...]
    """The prompt's ids; at least one."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int = -1
    """-1: until the context is full. 0: the prompt is evaluated and no token is made."""
    stop: tuple[str, ...] = ()
    """Generation ends before the first of these strings to be complete; empty ones are ignored."""
    cache_prompt: bool = True
    """Reuse the cached prefix of the prompt."""
    scope: str = ""
    """Only entries of the same scope are reused (a salt derived from the API key, or "" for all)."""
    lane: int | None = None
    """llama-server's id_slot: run on this lane only."""
    id: str = ""


@dataclass(frozen=True, slots=True)
class TokenProb:
    """One of the likeliest tokens at a position; `logprob` is natural log (or a probability's log after sampling)."""

    id: int
    logprob: float


class Run(NamedTuple):
    """Consecutive rows of a batch that continue one sequence: rows [row, row + n_rows), positions from pos0."""

    lane: int
    row: int
    n_rows: int
    pos0: int
    is_decode: bool
    """A generated token's row, as opposed to a piece of a prompt. Decides the numeric path, so that a
    stream's numbers do not depend on what else is in the batch."""


@dataclass(slots=True, eq=False)
class Batch:
    """One step's work. Nothing it refers to changes while it is in flight.

    Row r feeds `tokens[r]` at `positions[r]` of the sequence on `lanes[r]`, writes its K and V into
    `cells[r]`, and attends to the cells `cell_table[lanes[r], : positions[r] + 1]` (in position order; the
    row's own cell is the last of them).
    """

    tokens: Int32Array
    positions: Int32Array
    lanes: Int32Array
    cells: Int32Array
    runs: tuple[Run, ...]
    """Decode runs first (one row each), then prompt pieces; together they cover every row once, in order."""
    cell_table: Int32Array
    """[n_lanes, n_ctx]: the KVCells' own table, read only."""
    out_rows: Int32Array
    """[m] rows whose logits are wanted, ascending."""
    n_candidates: int = 1
    """How many of the likeliest tokens to report for each wanted row (1 to 256)."""
    needs_sums: bool = True
    """Whether `logsumexp` is wanted: without, a device may find the likeliest tokens by reading less."""
    full_rows: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))
    """Indices into out_rows whose whole logits row is wanted as well."""

    @property
    def n_rows(self) -> int:
        """Rows in the batch."""
        return len(self.tokens)


@dataclass(slots=True, eq=False)
class StepOutput:
    """What a step found for its m wanted rows."""

    ids: Int32Array
    """[m, k] likeliest tokens, by descending logit; of equal logits the lower id first. Where a logit is NaN, any."""
    logits: FloatArray
    """[m, k] their logits (soft-capped where the model does that)."""
    logsumexp: FloatArray
    """[m] over the row's whole logits: logprob = logit - logsumexp. May be NaN where the batch did not need sums."""
    full: FloatArray
    """[len(full_rows), n_vocab]"""
    seconds: float = 0.0
    """Time the device worked on it."""
