"""Generation: one request under way, as its reader sees it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from types import TracebackType

import trio

from llamatrio.engine.events import Finished, Progress, Take, TokenEvent
from llamatrio.sched.sampler import Choice
from llamatrio.sched.sequence import Sequence
from llamatrio.sched.text import TextAssembler

MAX_BEHIND = 64
"""Events a reader may be behind before its sequence is left out of steps. It goes on when half of them are taken."""

Event = TokenEvent | Finished

_log = logging.getLogger("llamatrio.engine")


class Generation:
    """Events of one continuation: any number of TokenEvent, then exactly one Finished.

    Use it as a context manager: leaving the block early cancels the request at once, without an await, so it is safe
    wherever cancellation arrives. Another task that reads it then gets trio.ClosedResourceError, even while it waits.

        with engine.start(request) as generation:
            async for event in generation: ...
    """

    def __init__(
        self,
        seq: Sequence,
        assembler: TextAssembler,
        cancel: Callable[[Generation], None],
        resume: Callable[[], None],
    ) -> None:
        self.seq = seq
        self.assembler = assembler
        self.stopping_word = ""
        self.error = ""
        self.last_event_at: float | None = None
        self._cancel = cancel
        self._resume = resume
        # No bound is needed: a sequence whose reader is behind is paused instead, and then makes at most the token
        # that is in flight. Each token of each stream passes here, so it is a deque and one parked task; a memory
        # channel costs twice as much.
        self._events: deque[Event] = deque()
        self._reader: trio.lowlevel.Task | None = None
        """The task that waits for an event."""
        self._take: Take | None = None
        self._is_complete = False
        """The last event was put."""
        self._is_left = False
        """The reader has gone: events are dropped."""

    def __enter__(self) -> Generation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_left = True
        self._events.clear()
        self._wake_reader()
        self._cancel(self)

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> Event:
        if self._has_something():
            await trio.lowlevel.checkpoint()
        while not self._has_something():  # meanwhile another task may have taken it
            await self._wait()
        if self._is_left:
            raise trio.ClosedResourceError
        if not self._events:
            raise StopAsyncIteration
        event = self._events.popleft()
        if self.seq.is_paused and len(self._events) <= MAX_BEHIND // 2:
            self.seq.is_paused = False
            self._resume()
        return event

    def divert(self, take: Take | None) -> None:
        """Offers tokens to `take` first, as long as a reader waits for them; it must be quick and must not wait.

        It is called in the decode task. It returns what the reader is to get: nothing, or an event.
        """
        self._take = take

    def progress(self) -> Progress:
        """Where it stands now."""
        seq, now = self.seq, trio.current_time()
        started = seq.started if seq.started is not None else now
        first = seq.first_token_at
        ended = self.last_event_at if self.last_event_at is not None else now
        return Progress(
            n_prompt=seq.n_prompt,
            n_cached=seq.n_cached,
            n_predicted=seq.n_predicted,
            prompt_seconds=(first if first is not None else ended) - started,
            predicted_seconds=ended - first if first is not None else 0.0,
            lane=seq.lane if seq.lane is not None else -1,
        )

    # ---------------------------------------------------------------- the decode task's side

    def put(self, choice: Choice, piece: bytes, now: float) -> str | None:
        """Hands a token to the reader; returns the stop string that it completed, if it did."""
        shown = self.assembler.feed(piece)
        self.last_event_at = now
        probs = (choice,) if self.seq.request.sampling.n_probs else ()
        self._put(TokenEvent(shown.text, (choice.id,), probs), now)
        if shown.stopping_word is not None:
            self.stopping_word = shown.stopping_word
        elif len(self._events) >= MAX_BEHIND and not self.seq.is_finished:
            self.seq.is_paused = True
        return shown.stopping_word

    def finish(self, lane: int) -> None:
        """Hands over what text is left, and the end."""
        seq = self.seq
        assert seq.finish_reason is not None
        now = trio.current_time()
        if (rest := self.assembler.flush()) and not self.stopping_word:
            self._put(TokenEvent(rest, ()), now)
        at = self.progress()
        self._put(
            Finished(
                at.n_prompt, at.n_cached, at.n_predicted, at.prompt_seconds, at.predicted_seconds, lane,
                reason=seq.finish_reason, stopping_word=self.stopping_word, seed=seq.seed, error=self.error,
            ),
            now,
        )  # fmt: skip
        self._is_complete = True

    def _put(self, event: Event, now: float) -> None:
        if self._is_left:
            return
        if self._reader is not None:
            if self._take is not None and isinstance(event, TokenEvent):
                rest = self._offer(self._take, event, now)
                if rest is None:
                    return
                event = rest
            self._wake_reader()
        self._events.append(event)

    def _offer(self, take: Take, event: TokenEvent, now: float) -> TokenEvent | None:
        try:
            return take(event, now)
        except Exception:
            # The reader's fault must not reach the decode task: it meets its own mistake when it gets the event.
            _log.exception("a reader's take failed")
            self._take = None
            return event

    def _has_something(self) -> bool:
        """There is an event, or there will be none."""
        return bool(self._events) or self._is_complete or self._is_left

    def _wake_reader(self) -> None:
        if self._reader is not None:
            trio.lowlevel.reschedule(self._reader)
            self._reader = None

    async def _wait(self) -> None:
        """Until there is something for the reader."""
        if self._reader is not None:
            raise trio.BusyResourceError("another task reads this generation already")

        def give_up(_: object) -> trio.lowlevel.Abort:
            self._reader = None
            return trio.lowlevel.Abort.SUCCEEDED

        self._reader = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(give_up)
