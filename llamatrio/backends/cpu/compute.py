"""The compute queue: steps in order, on a thread that is ready for the next one without the GIL.

Rule 1. Whoever submits a step loads it into the tables and posts it, if the compute thread is free; otherwise the
        compute thread does, when it has finished the step before. So nearly always a step begins the moment it is
        submitted: the compute thread needs no GIL for it, and where the next step comes at once no wake-up either.
Rule 2. The tables belong to the step that is posted, until its results have been copied out of them.

The desk, on which steps are posted, is a `Team` of two: its member 0 is whoever posts, its member 1 the compute
thread, which is member 0 of the team that runs the step.

The owner of the steps also sets the pace of copies, which take time from the team: see `save_pause_us`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future
from types import TracebackType
from typing import NamedTuple

import numpy as np

from llamatrio.backends.cpu.machine import Machine, StepResults
from llamatrio.backends.cpu.step import CompiledStep
from llamatrio.backends.cpu.team import Team, keep_to_core
from llamatrio.sched.types import Batch, Int32Array, StepOutput

_BESIDE_DECODE_US = (200, 100)
_BESIDE_PROMPT_US = (1000, 400)
"""Pauses of a save and of a restore between their slices, by the step that runs beside. A slice takes some 20 to 40 us
of one core, for which the whole team waits. So a save lengthens a step of tokens by a tenth at most. Steps with a piece
of a prompt are the longest, the ones that the largest gap of a stream comes from: those it lengthens by a fiftieth. A
restore has somebody waiting for it."""


class _Posted(NamedTuple):
    """The step that has the tables, and what they point into."""

    batch: Batch
    future: Future[StepOutput]
    results: StepResults
    started: float


class ComputeThread:
    """Runs steps on a machine with a team that is not started yet. A context manager."""

    def __init__(self, machine: Machine, team: Team, compiled: CompiledStep) -> None:
        self._machine = machine
        self._team = team
        self._compiled = compiled
        self._desk = Team(2)
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Batch, Future[StepOutput]]] = deque()
        self._posted: _Posted | None = None
        self._pauses_us = np.zeros(2, np.int32)

    @property
    def is_busy(self) -> bool:
        """Whether a step is running, as of now."""
        return self._posted is not None

    @property
    def save_pause_us(self) -> Int32Array:
        """How long a save is to sleep between slices [1], as of now: not at all between steps."""
        return self._pauses_us[:1]

    @property
    def restore_pause_us(self) -> Int32Array:
        """The same for a restore."""
        return self._pauses_us[1:]

    @property
    def n_threads(self) -> int:
        """Threads that a step runs on."""
        return self._team.n_members

    def __enter__(self) -> ComputeThread:
        self._desk.__enter__()
        self._team.start(self._help)
        self._desk.start(lambda _: self._serve())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._desk.__exit__(kind, error, trace)

    def submit(self, batch: Batch) -> Future[StepOutput]:
        """Queues a step."""
        future: Future[StepOutput] = Future()
        with self._lock:
            self._waiting.append((batch, future))
            if self._posted is None:
                self._post_next()
        return future

    def _post_next(self) -> None:
        """Loads and posts the oldest step that can be loaded. Under the lock, with the tables free."""
        while self._waiting:
            batch, future = self._waiting.popleft()
            started = time.perf_counter()
            try:
                results = self._machine.load_batch(batch, self._machine.plan(batch))
            except Exception as error:
                future.set_exception(error)
                continue
            self._posted = _Posted(batch, future, results, started)
            self._pauses_us[:] = _BESIDE_DECODE_US if all(run.is_decode for run in batch.runs) else _BESIDE_PROMPT_US
            self._compiled.post(self._desk.address)
            return
        self._pauses_us[:] = 0

    def _help(self, member: int) -> int:
        """A helper thread."""
        keep_to_core(member, self.n_threads)
        return self._enter(member)

    def _enter(self, member: int) -> int:
        machine, team, desk = self._machine, self._team.address, self._desk.address
        return self._compiled.enter(machine.step, machine.layers, machine.matrices, machine.batches, team, desk, member)

    def _serve(self) -> None:
        """The compute thread."""
        keep_to_core(0, self.n_threads)
        while self._enter(0):
            posted = self._posted
            assert posted is not None
            error: Exception | None = None
            try:
                output = posted.results.step_output(time.perf_counter() - posted.started)
            except Exception as caught:  # whoever waits must hear of it
                error = caught
            with self._lock:
                self._posted = None
                self._post_next()
            if error is None:
                posted.future.set_result(output)
            else:
                posted.future.set_exception(error)
