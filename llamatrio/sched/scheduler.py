"""The scheduler: which tokens are evaluated in the next step. Owned by the decode task; pure and synchronous.

Life of a step: `schedule(now)` -> Batch -> (the device works) -> `update(output, now)` -> tokens. In between nothing
that the batch refers to may change, so a sequence that is aborted meanwhile keeps its lane and cells until `update`.

Rule 1. Every running sequence decodes one token in every step. Prompts get the rows that are left: enough to keep
        the step near the target inter-token time, in order of arrival (first come, first started).
Rule 2. A prompt is cut only at multiples of PIECE positions, or at its end. Backends choose the numeric path of a
        prompt row within such pieces, so a prompt's numbers do not depend on the load.
Rule 3. When cells run out: (a) cells of saved idle prefixes are dropped; (b) idle prefixes that are not saved are
        saved, and waited for; (c) where they cannot be saved they are dropped; (d) a running sequence is preempted,
        one whose reader sleeps before the youngest: its cells become an idle prefix and it waits at the head of the
        queue; (e) a sequence that is alone and still does not fit ends with reason `length`.
Rule 4. A sequence that turns idle becomes a prefix in the prompt cache at once, and a save of what is new begins.
Rule 5. A prompt that begins as an earlier one does, which is being evaluated, follows it: it waits, which costs it
        nothing since the earlier one goes first anyway, and takes the cells. So what arrives together with one
        system prompt evaluates it once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, NamedTuple

from llamatrio.kv.cells import Int32Array, KVCells
from llamatrio.kv.node import Node, RestoreTicket, SaveTicket
from llamatrio.kv.prompt_cache import PromptCache
from llamatrio.sched.flight import Flight
from llamatrio.sched.pace import Pace
from llamatrio.sched.sampler import Choice
from llamatrio.sched.sequence import Sequence, Status
from llamatrio.sched.types import PIECE, Batch, FinishReason, Request, StepOutput

MIN_DROP = 256
"""Cells are dropped in batches of at least this many, so that a full pool does not cost a search in every step."""


Room = Literal["ok", "wait", "full"]
"""Whether cells are free; `wait`: saves under way will free some."""


class NewToken(NamedTuple):
    """A token that a step made."""

    seq: Sequence
    choice: Choice


@dataclass(slots=True)
class Limits:
    """What the scheduler must keep to."""

    n_vocab: int
    n_parallel: int
    n_ctx_seq: int
    """Tokens that one sequence may hold."""
    n_batch: int
    """Most rows in a step."""
    n_ubatch: int
    """Most prompt rows in a step."""
    eog_ids: Collection[int] = ()
    """End-of-generation tokens."""
    save_when_idle: bool = True


class Scheduler:
    """Waiting and running sequences over one pool of cells."""

    def __init__(self, cells: KVCells, cache: PromptCache, limits: Limits, pace: Pace) -> None:
        self.cells = cells
        self.cache = cache
        self.limits = limits
        self.pace = pace
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        """In order of arrival; holders of a lane."""
        self.n_preempted = 0
        self.n_steps = 0
        self._n_retired = 0
        self._refused: tuple[int, int, int] | None = None
        self._is_short = False
        """Somebody who runs did not get the cells it needs: nobody is admitted (a preempted sequence would come
        back to the cells it was just sent away from)."""
        self._free_lanes = list(range(limits.n_parallel))
        self._flight: Flight | None = None
        """The step in flight."""
        self._jobs: list[SaveTicket | RestoreTicket] = []
        self._finished: list[Sequence] = []
        self._restoring: dict[int, list[Sequence]] = {}
        """Sequences that wait for a restore, by the identity of its ticket."""
        self._next_id = 0

    # ---------------------------------------------------------------- requests

    def add(self, request: Request, seed: int, now: float) -> Sequence:
        """Queues a request. Its prompt has at least one token and leaves room for one more (checked by the engine)."""
        assert 0 < len(request.tokens) < self.limits.n_ctx_seq
        seq = Sequence(self._next_id, request, seed, now, self.limits.eog_ids)
        self._next_id += 1
        self.waiting.append(seq)
        return seq

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """Ends a sequence; what it computed becomes an idle prefix. Idempotent."""
        if seq.is_finished:
            return
        was = seq.status
        self._end(seq, reason)
        if was is Status.WAITING:
            self.waiting.remove(seq)
        elif not self._is_in_flight(seq) and was is not Status.RESTORING:
            self._retire(seq)
        # In flight: `update` retires it. Restoring: `finish_restore` does.

    def take_jobs(self) -> list[SaveTicket | RestoreTicket]:
        """Saves and restores that have begun and are to be carried out."""
        jobs, self._jobs = self._jobs, []
        return jobs

    def in_flight(self) -> list[Sequence]:
        """The sequences of the batch that schedule returned last, one for each of its runs."""
        return [part.seq for part in self._flight.parts] if self._flight else []

    def take_finished(self) -> list[Sequence]:
        """Sequences that have ended since the last call, for whatever reason."""
        finished, self._finished = self._finished, []
        return finished

    # ---------------------------------------------------------------- a step

    def schedule(self, now: float) -> Batch | None:
        """The next step's batch, or None when nothing can run now."""
        assert self._flight is None
        while True:
            n_retired = self._n_retired
            if not (self._is_short and self.running):
                self._admit(now)
            self._is_short = False
            self._let_followers_go()
            planned = Flight()
            for seq in list(self.running):  # may shrink on the way, by preemption
                if self._is_runnable(seq) and seq.is_decoding:
                    self._plan_decode(planned, seq)
            self._plan_prompts(planned)
            if planned.parts:
                self._flight = planned
                return planned.batch(self.cells.table, self.limits.n_vocab)
            if self._n_retired == n_retired:
                return None
            # Somebody had to go and nobody runs yet: the lanes and cells that became free are for those who wait.

    def update(self, output: StepOutput, now: float) -> list[NewToken]:
        """Takes a step's result: advances the sequences, chooses their tokens, and ends those that are done."""
        flight = self._land()
        self.n_steps += 1
        runs = [part.run for part in flight.parts]
        self.pace.observe(
            n_decode=sum(run.is_decode for run in runs),
            n_prompt=sum(run.n_rows for run in runs if not run.is_decode),
            seconds=output.seconds,
        )
        for seq, run, _ in flight.parts:
            seq.n_past += run.n_rows
            if seq.request.max_tokens == 0 and seq.n_pending == 0 and not seq.is_finished:
                self._end(seq, "length")
        new: list[NewToken] = []
        for seq, choice in flight.choices(output):
            if choice is None:
                self._end(seq, "error")
            else:
                new.append(self._take_token(seq, choice, now))
        for seq, run, _ in flight.parts:
            if seq.is_finished:
                self._retire(seq)
            elif not run.is_decode and seq.n_past == seq.n_prompt:
                self._share(seq, seq.n_prompt)
        return new

    def fail_step(self) -> list[Sequence]:
        """The step in flight failed: its sequences end, and the cells it wrote are given up. Returns them."""
        seqs = [part.seq for part in self._land().parts]
        for seq in seqs:
            assert seq.lane is not None
            self.cells.seq_rm(seq.lane, seq.n_past)
            if not seq.is_finished:
                self._end(seq, "error")
            self._retire(seq)
        return seqs

    def _land(self) -> Flight:
        assert self._flight is not None
        flight, self._flight = self._flight, None
        return flight

    # ---------------------------------------------------------------- saves and restores that ended

    def finish_restore(self, ticket: RestoreTicket, *, ok: bool) -> None:
        """A restore has ended; the sequences that waited for it go on, or fall back to what is resident."""
        seqs = self._restoring.pop(id(ticket), [])
        if ok:
            self.cache.commit_restore(ticket)
        else:
            for seq in seqs:
                self._unlock(seq)
                seq.may_restore = False
            self.cache.abort_restore(ticket, forget=True)
        for seq in seqs:
            if seq.is_finished:
                self._retire(seq)
            else:
                self._enter(seq)

    # ---------------------------------------------------------------- admission

    def _admit(self, now: float) -> None:
        """Gives lanes to waiting sequences, in order; one that waits for a lane of its own, or for its reader, holds up
        nobody else."""
        for seq in list(self.waiting):
            if not self._free_lanes:
                return
            lane = self._lane_for(seq)
            if lane is None or seq.is_paused:
                continue
            if self._was_refused(seq) or not self._has_room_to_start(seq):
                self._refused = self._room_changes(seq)
                return
            self._free_lanes.remove(lane)
            self.waiting.remove(seq)
            seq.lane = lane
            if seq.started is None:
                seq.started = now
            self.running.append(seq)
            self.running.sort(key=lambda s: s.id)
            self._enter(seq)

    def _lane_for(self, seq: Sequence) -> int | None:
        wanted = seq.request.lane
        if wanted is None:
            return self._free_lanes[0]
        return wanted if wanted in self._free_lanes else None

    def _was_refused(self, seq: Sequence) -> bool:
        """Whether this sequence found no room before and nothing has happened since that makes any. A long prompt
        that waits would otherwise be matched against the tree in every step."""
        return bool(self.running) and self._refused == self._room_changes(seq)

    def _room_changes(self, seq: Sequence) -> tuple[int, int, int]:
        return seq.id, self._n_retired, self.cache.counters.saves + self.cache.counters.saves_aborted

    def _has_room_to_start(self, seq: Sequence) -> bool:
        """Whether there are cells for all that is to be restored and for a first piece; where it was preempted, for all
        that it had.

        With fewer it would evaluate again what is saved: that takes as many cells and more time, and a preempted
        sequence would go on with other numbers than it had, or be preempted before it gets as far as it was.
        """
        match = self.cache.match_prefix(seq.request.scope, self._known(seq))
        n_missing = sum(len(node) for node in match.to_restore if not node.busy) if seq.may_restore else 0
        self.cache.lock(match.node)  # its resident part must not make room for the rest
        n_new = seq.n_pending - match.n_tokens
        room = self._reserve(n_missing + (n_new if seq.resumed else min(n_new, PIECE)))
        self.cache.unlock(match.node)
        return room == "ok" or (room == "full" and not self.running)

    def _known(self, seq: Sequence) -> Int32Array:
        """The tokens that may come from the cache; the last one is evaluated in any case."""
        return seq.array(0, len(seq.tokens) - 1 if seq.request.cache_prompt else 0)

    def _enter(self, seq: Sequence) -> None:
        """Starts a sequence on its lane from the longest prefix that is known, or begins to restore it."""
        assert seq.lane is not None
        if seq.node is not None:
            self._unlock(seq)
        known = self._known(seq)
        match = self.cache.match_prefix(seq.request.scope, known)
        self.cache.lock(match.node)
        seq.node = match.node
        if match.to_restore and seq.may_restore and self._begin_restore(seq, match.to_restore):
            return
        self._stand_on(seq, match.n_resident)
        seq.status = Status.RUNNING
        seq.leader = self._find_leader(seq)
        if seq.leader is None and not seq.resumed and seq.request.cache_prompt:
            self.cache.count_lookup(seq.request.scope, known, match.n_resident, min(seq.n_restored, match.n_resident))

    def _find_leader(self, seq: Sequence) -> Sequence | None:
        """The first of the earlier prompts under way from which a piece or more can be taken (rule 5)."""
        n = seq.n_past + PIECE
        if not seq.request.cache_prompt or n >= len(seq.tokens):
            return None
        beginning = seq.tokens[:n]
        for other in self.running:
            if other is seq:
                break
            if _leads(other) and other.request.scope == seq.request.scope and other.tokens[:n] == beginning:
                return other
        return None

    def _let_followers_go(self) -> None:
        """Those whose leader goes no further start again, from what it left in the tree."""
        for seq in self.running:
            if seq.leader is not None and not _leads(seq.leader):
                assert seq.lane is not None
                self.cells.seq_rm(seq.lane)
                self._enter(seq)

    def _begin_restore(self, seq: Sequence, nodes: tuple[Node, ...]) -> bool:
        """Whether the sequence now waits for a restore, its own or one that is under way."""
        under_way = next((node.busy for node in nodes if isinstance(node.busy, RestoreTicket)), None)
        if under_way is None:
            if self._reserve(sum(len(node) for node in nodes)) != "ok":
                return False
            under_way = self.cache.begin_restore(nodes)
            self._jobs.append(under_way)
        seq.n_restored += sum(len(node) for node in under_way.nodes)
        self._restoring.setdefault(id(under_way), []).append(seq)
        seq.status = Status.RESTORING
        return True

    def _stand_on(self, seq: Sequence, n_resident: int) -> None:
        """The sequence takes the resident part of its path as its own beginning."""
        assert seq.node is not None
        assert seq.lane is not None
        path = self.cache.path(seq.node, n_resident)
        node = path[-1] if path else self.cache.root(seq.request.scope)
        self.cache.lock(node)
        self.cache.unlock(seq.node)
        seq.node = node
        for step in path:
            assert step.cells is not None
            self.cells.seq_share(seq.lane, step.cells)
        seq.n_past = seq.n_shared = n_resident
        if not seq.resumed:
            seq.n_cached = n_resident

    def _unlock(self, seq: Sequence) -> None:
        if seq.node is not None:
            self.cache.unlock(seq.node)
            seq.node = None

    # ---------------------------------------------------------------- planning

    def _is_runnable(self, seq: Sequence) -> bool:
        return seq.status is Status.RUNNING and not seq.is_paused

    def _plan_decode(self, planned: Flight, seq: Sequence) -> None:
        while (room := self._reserve(1)) == "full" and self._take_from_another(seq):
            pass
        if room == "ok":
            self._plan(planned, seq, 1, is_decode=True)
        else:
            self._is_short = True

    def _take_from_another(self, seq: Sequence) -> bool:
        """Preempts one for `seq` (rule 3d); False when that is itself: it waits, or ends if it is alone."""
        victim = self._most_dispensable()
        if victim is not seq:
            self._preempt(victim)
            return True
        if len(self.running) == 1:
            self.finish(seq, "length")
        return False

    def _plan_prompts(self, planned: Flight) -> None:
        prompts = [s for s in self.running if self._is_runnable(s) and not s.is_decoding and s.leader is None]
        if not prompts:
            return
        limit = min(self.limits.n_batch - planned.n_rows, self.limits.n_ubatch)
        budget = self.pace.prompt_rows(n_decode=planned.n_rows, limit=limit, piece=PIECE)
        for seq in prompts:
            n = _piece(seq.n_past, seq.n_pending, budget)
            if not self._is_runnable(seq):
                continue  # preempted for one that came before
            # First come, first started: nobody overtakes the one that does not fit.
            if n == 0 or not self._make_room_for_prompt(planned, seq, n):
                return
            self._plan(planned, seq, n, is_decode=False)
            budget -= n

    def _make_room_for_prompt(self, planned: Flight, seq: Sequence, n: int) -> bool:
        """A prompt waits for cells as long as anybody else makes progress; only then does it take them."""
        while (room := self._reserve(n)) == "full" and not planned.parts:
            if not self._take_from_another(seq):
                break
        self._is_short |= room != "ok"
        return room == "ok"

    def _plan(self, planned: Flight, seq: Sequence, n: int, *, is_decode: bool) -> None:
        assert seq.lane is not None
        cells = [self.cells.seq_grow_one(seq.lane)] if n == 1 else self.cells.seq_grow(seq.lane, n).tolist()
        planned.add(seq, cells, is_decode=is_decode)

    def _take_token(self, seq: Sequence, choice: Choice, now: float) -> NewToken:
        seq.tokens.append(choice.id)
        if seq.first_token_at is None:
            seq.first_token_at = now
        if choice.id in self.limits.eog_ids and not seq.request.sampling.ignore_eos:
            self._end(seq, "stop")
        elif seq.n_predicted == seq.request.max_tokens or len(seq.tokens) >= self.limits.n_ctx_seq:
            self._end(seq, "length")
        return NewToken(seq, choice)

    # ---------------------------------------------------------------- leaving

    def _end(self, seq: Sequence, reason: FinishReason) -> None:
        seq.status, seq.finish_reason = Status.FINISHED, reason
        self._finished.append(seq)

    def _share(self, seq: Sequence, n: int) -> None:
        """The sequence's first n tokens become a prefix that others can use while it runs on."""
        assert seq.lane is not None
        assert seq.node is not None
        seq.node = self.cache.extend(seq.lane, seq.node, seq.n_shared, seq.array(seq.n_shared, n))
        seq.n_shared = self.cache.depth(seq.node)

    def _retire(self, seq: Sequence) -> None:
        """Takes a sequence off its lane; what it computed is an idle prefix from now on (rule 4)."""
        assert seq.lane is not None
        if seq.node is not None:
            self._share(seq, seq.n_past)
            idle = seq.node
            self.cells.seq_rm(seq.lane)
            self._unlock(seq)
            if self.limits.save_when_idle and (ticket := self.cache.begin_save(idle)) is not None:
                self._jobs.append(ticket)
        self._n_retired += 1
        self.running.remove(seq)
        self._free_lanes.append(seq.lane)
        self._free_lanes.sort()
        seq.lane = seq.leader = None

    def _preempt(self, seq: Sequence) -> None:
        """Sends a running sequence back to the head of the queue (rule 3d)."""
        self._retire(seq)
        seq.status, seq.resumed = Status.WAITING, True
        seq.n_past = seq.n_shared = 0
        self.waiting.appendleft(seq)
        self.n_preempted += 1

    def _most_dispensable(self) -> Sequence:
        running = [seq for seq in reversed(self.running) if seq.status is Status.RUNNING]
        return next((seq for seq in running if seq.is_paused), running[0])

    def _reserve(self, n: int) -> Room:
        """Sees to it that n cells are free, as far as idle prefixes allow (rule 3, a to c)."""
        if (missing := n - self.cells.n_free) <= 0:
            return "ok"
        self.cache.drop_cells(max(missing, MIN_DROP))
        if n <= self.cells.n_free:
            return "ok"
        if self.cache.n_saving:
            return "wait"
        if (ticket := self.cache.begin_save_oldest()) is not None:
            self._jobs.append(ticket)
            return "wait"
        self.cache.drop_dirty_cells(max(n - self.cells.n_free, MIN_DROP))
        return "ok" if n <= self.cells.n_free else "full"

    def _is_in_flight(self, seq: Sequence) -> bool:
        return self._flight is not None and seq in self._flight

    def check_invariants(self) -> None:
        """Asserts that lanes, sequences, cells and cache agree."""
        held = [seq.lane for seq in self.running if seq.lane is not None]
        assert len(held) == len(self.running)
        assert sorted([*held, *self._free_lanes]) == list(range(self.limits.n_parallel))
        assert [seq.id for seq in self.running] == sorted(seq.id for seq in self.running)
        for seq in self.running:
            assert seq.lane is not None
            if seq.status is Status.RUNNING and not self._is_in_flight(seq):
                assert self.cells.lengths[seq.lane] == seq.n_past
                assert seq.node is not None
                assert self.cache.depth(seq.node) == seq.n_shared
            if seq.leader is not None:
                assert seq.leader.id < seq.id
                assert seq.n_past == seq.n_shared
        for seq in self.waiting:
            assert seq.status is Status.WAITING
            assert seq.lane is None
        self.cache.check_invariants()
        self.cells.check_invariants(self.cache.held_cells())


def _leads(seq: Sequence) -> bool:
    """Whether its prompt is being evaluated."""
    return seq.status in (Status.RUNNING, Status.RESTORING) and not (seq.is_decoding or seq.is_paused)


def _piece(n_past: int, n_pending: int, budget: int) -> int:
    """How many of a prompt's next tokens fit into the budget, cut where rule 2 allows."""
    if n_pending <= budget:
        return n_pending
    return max(0, (n_past + budget) // PIECE * PIECE - n_past)
