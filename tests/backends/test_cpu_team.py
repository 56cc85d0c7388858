"""The thread team: every member runs every job, barriers hold, and idle members cost nothing."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
from numba import njit

from llamatrio.backends.cpu import team as module
from llamatrio.backends.cpu.native import load_i64, store_i64
from llamatrio.backends.cpu.team import Team, keep_to_core


@njit(nogil=True)
def count_together(team, member, words, n):
    """Each round every member adds its share to its own word, and then checks all words of the round."""
    if member == 0:
        module.post(team)
    while member == 0 or module.await_post(team, member):
        n_members = module.constant(team, module.N_MEMBERS)
        for _ in range(n):
            before = load_i64(words, member)
            store_i64(words, member, before + 1)
            module.barrier(team, member)
            for other in range(n_members):
                if load_i64(words, other) != before + 1:
                    store_i64(words, n_members, 1)
            module.barrier(team, member)
        if member == 0:
            return


@contextmanager
def running(n_members: int, n: int) -> Iterator[tuple[Callable[[], None], np.ndarray]]:
    words = np.zeros(n_members + 1, np.int64)
    with Team(n_members) as team:
        team.start(lambda member: count_together(team.address, member, words.ctypes.data, n))
        yield lambda: count_together(team.address, 0, words.ctypes.data, n), words


@pytest.mark.parametrize("n_members", [1, 2, 3, 5])
def test_members_meet_at_every_barrier(n_members: int) -> None:
    with running(n_members, 50) as (run, words):
        for _ in range(20):
            run()
        assert words[:-1].tolist() == [1000] * n_members
        assert words[-1] == 0, "a member was ahead of a barrier"


def test_parked_members_cost_nothing_and_come_back() -> None:
    with running(3, 10) as (run, words):
        run()
        deadline = time.monotonic() + 10
        spent = 1.0
        while spent > 0.002 and time.monotonic() < deadline:  # until the helpers have parked
            start = time.process_time()
            threading.Event().wait(0.05)
            spent = time.process_time() - start
        assert spent <= 0.002
        run()
        assert words.tolist() == [20, 20, 20, 0]


def test_leaving_stops_the_members() -> None:
    before = threading.active_count()
    with running(3, 1) as (run, _):
        run()
        assert threading.active_count() == before + 2
    assert threading.active_count() == before
    with pytest.raises(ValueError, match="at least 1"):
        Team(0)


def test_tickets_are_handed_out_once() -> None:
    @njit
    def take(team, n):
        module.reset_tickets(team)
        total = 0
        for _ in range(n):
            total += module.next_ticket(team)
        return total

    with Team(1) as team:
        assert take(team.address, 10) == 45
        assert take(team.address, 5) == 10


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not let threads choose their core")
def test_a_team_as_large_as_the_machine_keeps_each_member_to_a_core() -> None:
    def cores_of(member: int, n_members: int) -> set[int]:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(keep_to_core, member, n_members).result()
            return pool.submit(os.sched_getaffinity, 0).result()

    usable = os.sched_getaffinity(0)
    n = len(usable)
    assert set().union(*(cores_of(member, n) for member in range(n))) == usable
    assert all(len(cores_of(member, n)) == 1 for member in range(n))
    assert cores_of(0, n + 1) == usable, "more members than cores: the system shares them out"
    assert os.sched_getaffinity(0) == usable, "other threads go where they like"
