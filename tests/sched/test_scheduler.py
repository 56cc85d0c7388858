"""Who makes room for whom, step by step on the fake pool."""

from __future__ import annotations

from llamatrio.kv.cells import KVCells
from llamatrio.kv.prompt_cache import PromptCache
from llamatrio.sched.pace import Pace
from llamatrio.sched.scheduler import Limits, Scheduler
from llamatrio.sched.sequence import Sequence, Status
from llamatrio.sched.types import Request, SamplingParams
from tests.fakes import EOG, N_VOCAB, FakePool, reference

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
N_CELLS = 100


class Bench:
    """A scheduler without a host tier, and its device."""

    def __init__(self, n_parallel: int = 2) -> None:
        cells = KVCells(N_CELLS, n_parallel, N_CELLS)
        limits = Limits(N_VOCAB, n_parallel, n_ctx_seq=N_CELLS, n_batch=256, n_ubatch=128, eog_ids=frozenset({EOG}))
        self.scheduler = Scheduler(cells, PromptCache(cells, 16, 0), limits, Pace(0.05))
        self.pool = FakePool(N_CELLS)

    def add(self, first: int, max_tokens: int) -> Sequence:
        request = Request(tuple(range(first, first + 10)), GREEDY, max_tokens)
        return self.scheduler.add(request, 1, 0.0)

    def step(self) -> bool:
        batch = self.scheduler.schedule(0.0)
        if batch is not None:
            self.scheduler.update(self.pool.step(batch), 0.0)
            self.scheduler.check_invariants()
        return batch is not None

    def run(self) -> None:
        while self.step():
            pass


def is_right(seq: Sequence) -> bool:
    """It has made all its tokens, and they are those of its prompt."""
    n = seq.request.max_tokens
    return seq.tokens[seq.n_prompt :] == reference(seq.request.tokens, n, ignore_eos=True)


def test_the_youngest_makes_room() -> None:
    bench = Bench()
    older, younger = bench.add(1, 80), bench.add(20, 60)
    while not bench.scheduler.n_preempted:
        assert bench.step()
    assert (older.status, younger.status) == (Status.RUNNING, Status.WAITING)
    bench.run()
    assert is_right(older)
    assert is_right(younger)


def test_one_whose_reader_sleeps_makes_room_before_the_youngest_and_comes_back_when_it_wakes() -> None:
    bench = Bench()
    sleeper, younger = bench.add(1, 60), bench.add(20, 80)
    while sleeper.n_predicted < 40:
        assert bench.step()
    sleeper.is_paused = True
    bench.run()
    assert is_right(younger)
    assert bench.scheduler.n_preempted == 1
    assert sleeper.status is Status.WAITING, "it came back for a reader that sleeps"
    assert sleeper.n_predicted == 40
    sleeper.is_paused = False
    bench.run()
    assert is_right(sleeper)


def test_a_sleeper_that_waits_holds_up_nobody() -> None:
    bench = Bench(n_parallel=1)
    sleeper = bench.add(1, 5)
    sleeper.is_paused = True
    other = bench.add(20, 5)
    bench.run()
    assert is_right(other)
    assert sleeper.status is Status.WAITING
