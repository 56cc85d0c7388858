"""Sequence: the state of one request, from arrival to the last token. Owned by the scheduler."""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum, auto

import numpy as np

from llamatrio.kv.cells import Int32Array
from llamatrio.kv.node import Node
from llamatrio.sched.sampler import Sampler
from llamatrio.sched.types import FinishReason, Request


class Status(Enum):
    """Where a sequence stands."""

    WAITING = auto()
    """Not started, or preempted: holds no lane and no cells."""
    RESTORING = auto()
    """Holds a lane; part of its prefix is on its way back into cells."""
    RUNNING = auto()
    """Holds a lane; its tokens are being evaluated."""
    FINISHED = auto()


class Sequence:
    """One request's tokens and progress.

    `tokens[: n_past]` are in cells; the rest is still to be evaluated: a piece of the prompt, or the last token.
    """

    __slots__ = (
        "arrived", "finish_reason", "first_token_at", "id", "is_paused", "lane", "leader", "may_restore", "n_cached",
        "n_past", "n_prompt", "n_restored", "n_shared", "node", "request", "resumed", "sampler", "seed", "started",
        "status", "tokens",
    )  # fmt: skip

    def __init__(self, seq_id: int, request: Request, seed: int, now: float, eog_ids: Collection[int] = ()) -> None:
        self.id = seq_id
        self.request = request
        self.seed = seed
        self.sampler = Sampler(request.sampling, seed, eog_ids)
        self.tokens: list[int] = list(request.tokens)
        self.n_prompt = len(request.tokens)
        self.n_past = 0
        self.n_cached = 0
        """Prompt tokens that were not evaluated because their KV was known."""
        self.n_restored = 0
        """Tokens of the restores it waited for."""
        self.n_shared = 0
        """Tokens whose cells belong to `node` and its ancestors."""
        self.lane: int | None = None
        self.node: Node | None = None
        self.leader: Sequence | None = None
        """An earlier prompt under way that begins as this one does: this one waits, and takes its cells."""
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.is_paused = False
        """Its reader is not keeping up: it keeps its lane but is left out of steps."""
        self.may_restore = True
        """A restore failed for it: it evaluates what is not resident."""
        self.resumed = False
        """It was preempted before: its cached tokens are its own work, not the prompt's."""
        self.arrived = now
        self.started: float | None = None
        self.first_token_at: float | None = None

    @property
    def is_finished(self) -> bool:
        """It has ended, for whatever reason."""
        return self.status is Status.FINISHED

    @property
    def n_predicted(self) -> int:
        """Tokens generated."""
        return len(self.tokens) - self.n_prompt

    @property
    def n_pending(self) -> int:
        """Tokens still to be evaluated."""
        return len(self.tokens) - self.n_past

    @property
    def is_decoding(self) -> bool:
        """One generated token is to be evaluated."""
        return self.n_pending == 1 and self.n_predicted > 0

    def array(self, p0: int, p1: int) -> Int32Array:
        """The ids at positions [p0, p1)."""
        return np.array(self.tokens[p0:p1], np.int32)
