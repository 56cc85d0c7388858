"""The scheduler on the fake pool: whatever comes, goes or is saved, every sequence gets the tokens it must get."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llamatrio.kv.cells import KVCells
from llamatrio.kv.node import RestoreTicket, SaveTicket
from llamatrio.kv.packed import page_sizes
from llamatrio.kv.prompt_cache import PromptCache
from llamatrio.sched.pace import Pace
from llamatrio.sched.scheduler import Limits, Scheduler
from llamatrio.sched.sequence import Sequence, Status
from llamatrio.sched.types import Batch, Request, SamplingParams
from tests.fakes import EOG, N_VOCAB, FakePool, reference

N_CTX = 200
RECORD = 16
GREEDY = SamplingParams(temperature=0.0)
prompts = st.tuples(st.integers(0, 2), st.integers(1, 190)).map(
    lambda x: tuple((x[0] * 31 + i * i) % 60 + 1 for i in range(x[1]))
)


class SchedulerMachine(RuleBasedStateMachine):
    n_cells = 320
    budget: int | None = 400 * RECORD

    def __init__(self) -> None:
        super().__init__()
        cells = KVCells(self.n_cells, 3, N_CTX)
        self.cache = PromptCache(cells, RECORD, self.budget)
        limits = Limits(N_VOCAB, n_parallel=3, n_ctx_seq=N_CTX, n_batch=256, n_ubatch=128, eog_ids=frozenset({EOG}))
        self.scheduler = Scheduler(cells, self.cache, limits, Pace(0.05))
        self.pool = FakePool(self.n_cells)
        self.batch: Batch | None = None
        self.jobs: list[SaveTicket | RestoreTicket] = []
        self.live: list[Sequence] = []
        self.now = 0.0

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    @rule(
        prompt=prompts, max_tokens=st.integers(-1, 30), cache_prompt=st.booleans(), lane=st.none() | st.integers(0, 2)
    )
    def add(self, prompt: tuple[int, ...], max_tokens: int, cache_prompt: bool, lane: int | None) -> None:
        request = Request(prompt, GREEDY, max_tokens, cache_prompt=cache_prompt, lane=lane)
        self.live.append(self.scheduler.add(request, 1, self.tick()))

    @precondition(lambda self: self.batch is None)
    @rule()
    def schedule(self) -> None:
        self.batch = self.scheduler.schedule(self.tick())
        self.jobs += self.scheduler.take_jobs()
        if self.batch is not None:
            assert self.batch.n_rows <= 256
            assert sum(r.n_rows for r in self.batch.runs if not r.is_decode) <= 128
        self.check_finished()

    @precondition(lambda self: self.batch is not None)
    @rule()
    def update(self) -> None:
        assert self.batch is not None
        for token in self.scheduler.update(self.pool.step(self.batch), self.tick()):
            assert token.seq in self.live
        self.batch = None
        self.jobs += self.scheduler.take_jobs()
        self.check_finished()

    @precondition(lambda self: self.batch is not None)
    @rule()
    def fail(self) -> None:
        self.batch = None
        for seq in self.scheduler.fail_step():
            if seq in self.live:
                self.live.remove(seq)
        self.jobs += self.scheduler.take_jobs()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        seq = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.scheduler.finish(seq, "cancelled")
        self.jobs += self.scheduler.take_jobs()

    @precondition(lambda self: self.live)
    @rule(data=st.data(), paused=st.booleans())
    def pause(self, data: st.DataObject, paused: bool) -> None:
        data.draw(st.sampled_from(self.live)).is_paused = paused

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), ok=st.booleans())
    def end_job(self, data: st.DataObject, ok: bool) -> None:
        self.carry_out(self.jobs.pop(data.draw(st.integers(0, len(self.jobs) - 1))), ok)
        self.jobs += self.scheduler.take_jobs()

    def carry_out(self, job: SaveTicket | RestoreTicket, ok: bool = True) -> None:
        if isinstance(job, SaveTicket):
            records = self.pool.cells[job.cells].copy().view(np.uint8).reshape(-1, RECORD)
            self.cache.unpin_save(job)
            if ok:
                cuts = np.cumsum(page_sizes(len(records)))[:-1]
                self.cache.commit_save(job, np.split(records, cuts))
            else:
                self.cache.abort_save(job)
            return
        if ok:
            out = np.zeros((len(job.cells), RECORD), np.uint8)
            at = 0
            for part in job.records:
                part.copy_to(out[at : at + len(part)])
                at += len(part)
            self.pool.cells[job.cells] = out.reshape(-1).view(self.pool.cells.dtype)
        self.scheduler.finish_restore(job, ok=ok)

    def check_finished(self) -> None:
        for seq in [s for s in self.live if s.status is Status.FINISHED]:
            self.live.remove(seq)
            limit = seq.request.max_tokens if seq.request.max_tokens >= 0 else N_CTX
            out = seq.tokens[seq.n_prompt :]
            assert out == reference(seq.request.tokens, min(limit, N_CTX - seq.n_prompt))[: len(out)]
            if seq.finish_reason == "length" and len(seq.tokens) < N_CTX:
                alone = len(seq.tokens) >= self.n_cells  # it filled the pool by itself
                assert len(out) == seq.request.max_tokens or alone
            elif seq.finish_reason == "stop":
                assert out[-1] == EOG
            assert seq.n_cached < seq.n_prompt

    @invariant()
    def sound(self) -> None:
        if self.batch is None:
            self.scheduler.check_invariants()
        assert self.cache.used_bytes <= (self.budget or 1 << 40)

    def teardown(self) -> None:
        """Left alone, everything ends: nothing starves, nothing deadlocks, every cell is free or idle."""
        for seq in self.live:
            seq.is_paused = False
        for _ in range(3000):
            if self.batch is not None:
                self.update()
            while self.jobs:
                self.carry_out(self.jobs.pop())
                self.jobs += self.scheduler.take_jobs()
            self.schedule()
            if self.batch is None and not self.jobs:
                break
        assert not self.live, f"{len(self.live)} requests never ended"
        self.scheduler.check_invariants()
        assert self.scheduler.cells.n_used == self.cache.n_idle_cells
        assert not self.scheduler.running


class SmallPool(SchedulerMachine):
    """Hardly more than one sequence fits: preemption and room-making all the time."""

    n_cells = 210


class NoCache(SchedulerMachine):
    n_cells = 210
    budget = 0


class TinyPool(SchedulerMachine):
    """Not even one full sequence fits."""

    n_cells = 150


_settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = _settings
TestSmallPool = SmallPool.TestCase
TestSmallPool.settings = _settings
TestNoCache = NoCache.TestCase
TestNoCache.settings = _settings
TestTinyPool = TinyPool.TestCase
TestTinyPool.settings = _settings
