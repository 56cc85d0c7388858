"""The decode task: schedules a step, lets the device run it, and publishes the tokens of the step before meanwhile.

    schedule -> forward ---------------- (device works) ---------------- update -> schedule -> ...
                        publish the previous step's tokens

A device that takes every core leaves none to publish on: the tokens would lie until the system takes a core away from
the step, milliseconds later, and the step would end later by as much as publishing takes. There they go out first:

    update -> publish -> schedule -> forward ---------------- (device works) ---------------- update -> ...

It never waits for a reader, a save or a restore. A crash in it is a bug: it ends the engine and reaches whoever
opened it. A failed step (BackendError) ends the requests it was for, with an error, and nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio

from llamatrio.backends.base import Backend
from llamatrio.engine.completion import completed
from llamatrio.engine.generation import Generation
from llamatrio.engine.stats import Totals
from llamatrio.errors import BackendError
from llamatrio.kv.node import RestoreTicket, SaveTicket
from llamatrio.sched.scheduler import NewToken, Scheduler
from llamatrio.sched.sequence import Sequence

_log = logging.getLogger("llamatrio.engine")


class Decoder:
    """Owner of the scheduler and of the generations.

    piece(id) -> the token's bytes; begin(ticket) starts a save or restore; stall_timeout in seconds.
    """

    def __init__(
        self,
        backend: Backend,
        scheduler: Scheduler,
        totals: Totals,
        *,
        piece: Callable[[int], bytes],
        begin: Callable[[SaveTicket | RestoreTicket], None],
        stall_timeout: float,
    ) -> None:
        self.scheduler = scheduler
        self.generations: dict[int, Generation] = {}
        self._backend = backend
        self._totals = totals
        self._piece = piece
        self._begin = begin
        self._stall_timeout = stall_timeout
        self._wake = trio.Event()
        self._is_closing = False
        self._fresh: list[NewToken] = []
        """Tokens of the last step that were not published yet."""
        self._paused_since: dict[int, float] = {}
        self._lane_of: dict[int, int] = {}

    def wake(self) -> None:
        """Something changed that may let a step run."""
        self._wake.set()

    def close(self) -> None:
        """Ends every request; `run` returns when the step in flight has ended."""
        self._is_closing = True
        self.scheduler.limits.save_when_idle = False  # nobody comes back to what it would keep
        for generation in list(self.generations.values()):
            self.cancel(generation, "the server is shutting down")
        self.wake()

    def cancel(self, generation: Generation, error: str = "") -> None:
        """Ends a request whose reader has gone or must go. Idempotent."""
        generation.error = generation.error or error
        self.scheduler.finish(generation.seq, "cancelled")
        self.wake()

    async def run(self) -> None:
        """Until closed."""
        while True:
            self._wake = trio.Event()
            if self._backend.takes_every_core:
                self._publish()
                await trio.lowlevel.checkpoint()  # gives those who got something a turn to send it
            batch = self.scheduler.schedule(trio.current_time())
            self._begin_jobs()
            if batch is None:
                self._publish()
                if self._is_closing and not self.generations:
                    return
                await self._wait()
                continue
            for run, seq in zip(batch.runs, self.scheduler.in_flight(), strict=True):
                self._lane_of[seq.id] = run.lane
            step = self._backend.forward(batch)
            if not self._backend.takes_every_core:
                await trio.lowlevel.checkpoint()  # lets the device's thread have the GIL until it is in compiled code
                self._publish()
            try:
                output = await completed(step)
            except BackendError as error:
                self._fail(error)
            else:
                self._fresh = self.scheduler.update(output, trio.current_time())
            self._begin_jobs()

    async def _wait(self) -> None:
        """Until something changes, or a paused reader has used up its time."""
        self._expire_stalled()
        deadline = min(self._paused_since.values(), default=float("inf")) + self._stall_timeout
        with trio.move_on_at(deadline):
            await self._wake.wait()

    def _begin_jobs(self) -> None:
        for ticket in self.scheduler.take_jobs():
            self._begin(ticket)

    def _fail(self, error: BackendError) -> None:
        _log.error("a step failed: %s", error)
        for seq in self.scheduler.fail_step():
            if (generation := self.generations.get(seq.id)) is not None:
                generation.error = str(error)

    # ---------------------------------------------------------------- publishing

    def _publish(self) -> None:
        now = trio.current_time()
        fresh, self._fresh = self._fresh, []
        for token in fresh:
            self._publish_token(token, now)
        for seq in self.scheduler.take_finished():
            self._finish(seq)
        self._note_paused(now)

    def _publish_token(self, token: NewToken, now: float) -> None:
        seq = token.seq
        generation = self.generations.get(seq.id)
        if generation is None or seq.finish_reason in ("cancelled", "word"):
            return
        if generation.last_event_at is not None:
            self._totals.itl.add(now - generation.last_event_at)
        else:
            self._totals.ttft.add(now - seq.arrived)
        # The text ends before an end-of-generation token, whatever its bytes.
        piece = b"" if seq.finish_reason == "stop" else self._piece(token.choice.id)
        if generation.put(token.choice, piece, now) is not None:
            # The stop string may have been completed by a token that ended the sequence for another reason.
            if seq.is_finished:
                seq.finish_reason = "word"
            else:
                self.scheduler.finish(seq, "word")

    def _finish(self, seq: Sequence) -> None:
        generation = self.generations.pop(seq.id, None)
        self._paused_since.pop(seq.id, None)
        lane = self._lane_of.pop(seq.id, -1)
        if generation is None:
            return
        if not generation.error and seq.finish_reason == "error":
            generation.error = "no token may follow: each is banned, or its logit is not a number"
        generation.finish(lane)
        at = generation.progress()
        totals = self._totals
        if seq.n_past >= seq.n_prompt:
            totals.prompt_tokens += at.n_prompt - at.n_cached
            totals.cached_tokens += at.n_cached
            totals.prompt_seconds += at.prompt_seconds
        totals.predicted_tokens += at.n_predicted
        totals.predicted_seconds += at.predicted_seconds
        totals.n_tokens_max = max(totals.n_tokens_max, len(seq.tokens))

    # ---------------------------------------------------------------- readers that do not keep up

    def _note_paused(self, now: float) -> None:
        for seq_id, generation in self.generations.items():
            if generation.seq.is_paused:
                self._paused_since.setdefault(seq_id, now)
            else:
                self._paused_since.pop(seq_id, None)
        self._expire_stalled()

    def _expire_stalled(self) -> None:
        now = trio.current_time()
        for seq_id, since in list(self._paused_since.items()):
            if now - since >= self._stall_timeout:
                del self._paused_since[seq_id]
                generation = self.generations[seq_id]
                self.cancel(generation, f"nothing was read from the stream for {self._stall_timeout:.0f} s")
