"""A step in flight: one upload, the decode rows' graph, the prompt rows' launches, the choice of tokens, one download.

Only the likeliest tokens of each wanted row come back. Whole rows of logits come back where they are asked for, as
many as the pinned results hold; where more are asked for (evaluations do), the rest is enqueued, round by round, by
the completion thread, once it has emptied the results. Nobody waits in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import numpy as np
from cuda.core import Event

from llamatrio.backends.cuda.completion import Completions, complete, running_future
from llamatrio.backends.cuda.device import CUDAError, Gpu, driver_errors
from llamatrio.backends.cuda.forward import DeviceModel
from llamatrio.backends.cuda.graphs import DecodeGraphs
from llamatrio.backends.cuda.kernels.launcher import Launcher
from llamatrio.backends.cuda.memory import DeviceArena, PinnedMemory, aligned, pinned_memory
from llamatrio.backends.cuda.passes import PromptPass, choose
from llamatrio.backends.cuda.plan import StepPlan, plan_step
from llamatrio.errors import BackendError
from llamatrio.sched.types import Batch, FloatArray, Int32Array, StepOutput

WORD = 4
"""Bytes of an int32, and of a float32."""


class Part(NamedTuple):
    """Rows of results [first, first + n) whose logits are on the device at once."""

    first: int
    n: int


class Slot:
    """Pinned memory and events of one step; a step takes the slot that the last one did not have."""

    def __init__(self, pinned: PinnedMemory, model: DeviceModel, started: Event, done: Event) -> None:
        limits = model.limits
        self.pinned, self.started, self.done = pinned, started, done
        self.results_at = aligned(WORD * limits.input_words)
        self.logits_at = self.results_at + aligned(WORD * limits.result_words)
        self.logits: FloatArray = pinned.bytes[self.logits_at :].view(np.float32).reshape(limits.n_logits, -1)
        """[n_logits, n_vocab]"""
        self.future: Future[StepOutput] | None = None

    @property
    def words(self) -> Int32Array:
        """The input of a step."""
        return self.pinned.bytes[: self.results_at].view(np.int32)

    @property
    def results(self) -> Int32Array:
        """The results of a step."""
        return self.pinned.bytes[self.results_at : self.logits_at].view(np.int32)

    @property
    def is_free(self) -> bool:
        """Whether no step uses it."""
        return self.future is None or self.future.done()


def slot_bytes(model: DeviceModel) -> int:
    """Pinned bytes of a slot."""
    limits = model.limits
    logits = WORD * limits.n_logits * model.spec.n_vocab
    return aligned(WORD * limits.input_words) + aligned(WORD * limits.result_words) + logits


@contextmanager
def step_slots(gpu: Gpu, model: DeviceModel, n: int) -> Iterator[list[Slot]]:
    """n slots. Raises BackendError when memory is short."""
    with ExitStack() as stack:
        slots = []
        for _ in range(n):
            pinned = stack.enter_context(pinned_memory(slot_bytes(model), "the inputs and results of a step"))
            slots.append(Slot(pinned, model, started=gpu.new_event(stack), done=gpu.new_event(stack)))
        yield slots


class Steps:
    """Enqueues steps on the compute stream. Owned by the backend, called from its thread."""

    def __init__(
        self,
        gpu: Gpu,
        model: DeviceModel,
        arena: DeviceArena,
        graphs: DecodeGraphs,
        run: Launcher,
        slots: list[Slot],
        completions: Completions,
    ) -> None:
        self.gpu, self.model, self.arena, self.graphs, self.run = gpu, model, arena, graphs, run
        self.completions = completions
        self._slots = slots
        self._n_steps = 0
        self._last: Step | None = None

    def forward(self, batch: Batch) -> Future[StepOutput]:
        """Queues a checked batch. Raises ValueError where the steps before it must end first."""
        slot = self._slots[self._n_steps % len(self._slots)]
        if not slot.is_free or (self._last is not None and self._last.has_more):
            raise ValueError("expected the steps before this one to have ended")
        self._n_steps += 1
        step = Step(self, batch, slot)
        slot.future, self._last = step.future, step
        step.start()
        return step.future


class Step:
    """One step: `start` runs in the backend's thread, everything after it in the completion thread."""

    def __init__(self, steps: Steps, batch: Batch, slot: Slot) -> None:
        self._steps, self._model, self._slot = steps, steps.model, slot
        self._k = batch.n_candidates
        self._plan = plan_step(batch, self._model.heads, self._model.limits, slot.words)
        self._prompt = PromptPass(self._model, steps.run, self._plan)
        self._full = np.empty((len(batch.full_rows), self._model.spec.n_vocab), np.float32)
        self._full_of: dict[int, list[int]] = {}
        """Row of results -> the rows of `full` that want its logits."""
        for i, row in enumerate(self._plan.places[batch.full_rows].tolist()):
            self._full_of.setdefault(row, []).append(i)
        self._rounds = deque(split_rounds(self._plan, self._full_of.keys(), self._model.limits.n_logits))
        self._fetched: list[int] = []
        """Rows of results whose logits come with the round in flight, in order of the pinned rows."""
        self.future: Future[StepOutput] = running_future()

    @property
    def has_more(self) -> bool:
        """Whether a round is still to be enqueued, so that the scratch must be left alone."""
        return bool(self._rounds) and not self.future.done()

    def start(self) -> None:
        """Enqueues the passes and the first round."""

        def enqueue() -> None:
            steps, plan, compute = self._steps, self._plan, self._steps.gpu.compute
            compute.record(self._slot.started)
            self._slot.pinned.upload(0, WORD * plan.n_words, steps.arena, self._model.scratch.inputs, compute)
            if plan.bucket:
                steps.graphs.launch(plan.bucket, compute)
            if plan.n_prompt:
                self._prompt.enqueue()
            self._enqueue_round()

        self._queue(enqueue)

    def _queue(self, enqueue: Callable[[], None]) -> None:
        """Enqueues a round and asks for its completion; an error ends the step once what was enqueued has run."""
        slot, completions = self._slot, self._steps.completions
        try:
            with driver_errors("a step failed"):
                enqueue()
                self._steps.gpu.compute.record(slot.done)
        except Exception as error:  # a bug, too, must reach whoever waits
            failed = error
            try:
                self._steps.gpu.compute.record(slot.done)
            except CUDAError:
                self.future.set_exception(failed)
            else:
                completions.when_fired(slot.done, lambda _: self.future.set_exception(failed))
        else:
            completions.when_fired(slot.done, self._round_done)

    def _enqueue_round(self) -> None:
        self._fetched = []
        for part in self._rounds.popleft():
            if part.first >= self._plan.n_decode:  # the decode rows' logits are there already
                self._prompt.wanted_logits(part.first - self._plan.n_decode, part.n)
            self._choose(part)
            self._fetch_logits(part)
        n_bytes = WORD * self._plan.n_results * (2 * self._k + 1)
        if n_bytes and not self._rounds:
            slot, results = self._slot, self._model.scratch.results
            slot.pinned.download(slot.results_at, n_bytes, self._steps.arena, results, self._steps.gpu.compute)

    def _choose(self, part: Part) -> None:
        """The results: ids [n_results, k], then logits, then logsumexp [n_results]."""
        n_results, k, results = self._plan.n_results, self._k, self._model.scratch.results
        at = part.first * k
        choose(
            self._model,
            self._steps.run,
            n_rows=part.n,
            k=k,
            ids=results + WORD * at,
            values=results + WORD * (n_results * k + at),
            sums=results + WORD * (2 * n_results * k + part.first),
        )

    def _fetch_logits(self, part: Part) -> None:
        row_bytes, slot, steps = WORD * self._model.spec.n_vocab, self._slot, self._steps
        for row in range(part.first, part.first + part.n):
            if row in self._full_of:
                at = slot.logits_at + len(self._fetched) * row_bytes
                source = self._model.scratch.logits + (row - part.first) * row_bytes
                slot.pinned.download(at, row_bytes, steps.arena, source, steps.gpu.compute)
                self._fetched.append(row)

    def _round_done(self, error: BackendError | None) -> None:
        if error is None:
            for i, row in enumerate(self._fetched):
                self._full[self._full_of[row]] = self._slot.logits[i]
            if self._rounds:
                self._queue(self._enqueue_round)
                return
        complete(self.future, self._output, error)

    def _output(self) -> StepOutput:
        n, k, places = self._plan.n_results, self._k, self._plan.places
        ids, values, sums = np.split(self._slot.results[: n * (2 * k + 1)], [n * k, 2 * n * k])
        return StepOutput(
            ids=ids.reshape(n, k)[places],
            logits=values.view(np.float32).reshape(n, k)[places],
            logsumexp=sums.view(np.float32)[places],
            full=self._full,
            seconds=(self._slot.done - self._slot.started) / 1000,
        )


def split_rounds(plan: StepPlan, full_rows: Collection[int], most: int) -> list[list[Part]]:
    """The results in parts of at most `most` rows, in rounds of at most `most` whole rows of logits each."""
    parts = [Part(0, plan.n_decode)] if plan.n_decode else []
    parts += [Part(first, min(most, plan.n_results - first)) for first in range(plan.n_decode, plan.n_results, most)]
    rounds: list[list[Part]] = [[]]
    n_full = 0
    for part in parts:
        wanted = sum(row in full_rows for row in range(part.first, part.first + part.n))
        if n_full + wanted > most:
            rounds.append([])
            n_full = 0
        rounds[-1].append(part)
        n_full += wanted
    return rounds
