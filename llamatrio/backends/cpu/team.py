"""A team of threads that run one compiled function together, without the GIL.

Theory of operation. Member 0 is whichever thread has work (the backend's compute thread); members 1..n-1 are
helper threads that live in compiled code from start to end. Member 0 *posts* a job by raising the generation;
helpers spin for some microseconds for the next generation and then *park* in read() on a pipe, where they cost
nothing. Helpers never need the GIL, so a busy event loop cannot hold up a step.

Rule 1. Only member 0 posts, and only after every member has passed the last barrier of the job before.
Rule 2. A helper that parks first says so (state = PARKED), then looks at the generation once more; member 0 first
        raises the generation, then looks at the states. Both are sequentially consistent, so one sees the other.
Rule 3. Whoever exchanges PARKED for AWAKE settles it: member 0 then owes one byte to the pipe, and a helper that
        finds AWAKE there takes that byte before it goes on.
Rule 4. A barrier is a counter that only grows; every member keeps count of how often it passed.
Rule 5. Between jobs nobody yields: whoever waits parks soon, and leaves its core to the event loop. Since Linux 6.18
        a yield gives up all the time that a thread has coming, and with another process about, that stopped the
        team for tens of milliseconds. A barrier yields only after so long a wait that two members share a core.
Rule 6. A team as large as the machine keeps each member to a core of its own. The system puts two on one core
        otherwise, now and then, where each spins through its time slice while the other waits for it.

The control block is int64 words; words written by different members lie in different cache lines.
"""

# Numba infers types itself, and its intrinsics hide their signatures from mypy.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, no-any-return, call-arg"

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamatrio.backends.cpu.call import call_kernel
from llamatrio.backends.cpu.native import atomic_add, atomic_exchange, atomic_load, inner, load_i64, pause, store_i64

_LINE = 64  # bytes
GENERATION = 0 * _LINE
BARRIER = 1 * _LINE
STOP = 2 * _LINE
TICKET = 3 * _LINE
CONSTANTS = 4 * _LINE
# int64 indices within CONSTANTS
N_MEMBERS, YIELD_ADDRESS, READ_ADDRESS, WRITE_ADDRESS = range(4)
MEMBERS = 5 * _LINE
MEMBER_BYTES = 2 * _LINE
# byte offsets within a member
STATE, PASSED, SEEN, READ_FD, WRITE_FD, BYTE = 0, 64, 72, 80, 88, 96

_AWAKE, _PARKED = 0, 1
_BARRIER_SPINS = 1 << 16
"""Looks before a barrier yields: 1 to 4 ms, as a pause takes 15 to 60 ns."""
_IDLE_SPINS = 320
"""Looks before a helper parks: 5 to 20 us."""


@inner
def constant(team, index):
    return load_i64(team + CONSTANTS, index)


@inner
def member_of(team, member):
    """Address of a member's words."""
    return team + MEMBERS + member * MEMBER_BYTES


@inner
def barrier(team, member):
    """Returns when every member has called it as often as this one."""
    n_members = constant(team, N_MEMBERS)
    if n_members == 1:
        return
    passed = load_i64(member_of(team, member) + PASSED, 0) + 1
    store_i64(member_of(team, member) + PASSED, 0, passed)
    target = passed * n_members
    atomic_add(team + BARRIER, 1)
    n_spins = 0
    while atomic_load(team + BARRIER) < target:
        pause()
        n_spins += 1
        if n_spins > _BARRIER_SPINS:
            call_kernel(constant(team, YIELD_ADDRESS))


@inner
def post(team):
    """Member 0: lets the helpers go on with a new job."""
    atomic_add(team + GENERATION, 1)
    for member in range(1, constant(team, N_MEMBERS)):
        words = member_of(team, member)
        if atomic_exchange(words + STATE, _AWAKE) == _PARKED:
            call_kernel(constant(team, WRITE_ADDRESS), load_i64(words + WRITE_FD, 0), words + BYTE, 1)


@inner
def await_post(team, member):
    """A helper: waits for the next job. False when the team is to stop."""
    words = member_of(team, member)
    seen = load_i64(words + SEEN, 0)
    n_spins = 0
    while atomic_load(team + GENERATION) == seen:
        n_spins += 1
        if n_spins >= _IDLE_SPINS:
            _park(team, words, seen)
        else:
            pause()
    store_i64(words + SEEN, 0, seen + 1)
    return atomic_load(team + STOP) == 0


@inner
def _park(team, words, seen):
    atomic_exchange(words + STATE, _PARKED)
    if atomic_load(team + GENERATION) != seen and atomic_exchange(words + STATE, _AWAKE) == _PARKED:
        return  # Rule 3: nobody owes us a byte
    while True:
        call_kernel(constant(team, READ_ADDRESS), load_i64(words + READ_FD, 0), words + BYTE, 1)
        if atomic_load(words + STATE) == _AWAKE:  # else a signal interrupted read()
            return


@inner
def next_ticket(team):
    """Hands out 0, 1, 2, ... over all members; reset_tickets starts anew."""
    return atomic_add(team + TICKET, 1)


@inner
def reset_tickets(team):
    """By one member, between two barriers."""
    atomic_exchange(team + TICKET, 0)


def keep_to_core(member: int, n_members: int) -> None:
    """Rule 6, for the calling thread, where the system lets threads choose."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        if n_members == len(cores):
            os.sched_setaffinity(threading.get_native_id(), {cores[member]})


class _CFunctions(NamedTuple):
    """Addresses of C functions that the compiled code calls."""

    sched_yield: int
    read: int
    write: int


def _c_functions() -> _CFunctions:
    if sys.platform == "win32":
        kernel, runtime = ctypes.WinDLL("kernel32"), ctypes.CDLL("msvcrt")
        functions = kernel.SwitchToThread, runtime._read, runtime._write
    else:
        library = ctypes.CDLL(None)
        functions = library.sched_yield, library.read, library.write
    return _CFunctions(*(ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions))


class Team:
    """`n_members` - 1 helper threads that run `follow(member)` until the team stops. A context manager.

    `follow` must be compiled, release the GIL, call `await_post` in a loop and return when that is False.
    """

    def __init__(self, n_members: int) -> None:
        if n_members < 1:
            raise ValueError(f"expected at least 1 thread, not {n_members}")
        self.n_members = n_members
        n_words = (MEMBERS + n_members * MEMBER_BYTES + 2 * _LINE) // 8
        self._words: NDArray[np.int64] = np.zeros(n_words, np.int64)
        self.address = self._words.ctypes.data + -self._words.ctypes.data % _LINE
        self._threads: list[threading.Thread] = []
        self._pipes: list[tuple[int, int]] = []

    def __enter__(self) -> Team:
        functions = _c_functions()
        constants = self._view(CONSTANTS)
        constants[N_MEMBERS] = self.n_members
        constants[YIELD_ADDRESS] = functions.sched_yield
        constants[READ_ADDRESS] = functions.read
        constants[WRITE_ADDRESS] = functions.write
        for member in range(1, self.n_members):
            pipe = os.pipe()
            self._pipes.append(pipe)
            self._view(MEMBERS + member * MEMBER_BYTES + READ_FD)[:2] = pipe
        return self

    def start(self, follow: Callable[[int], Any]) -> None:
        """Starts the helpers. They cost nothing until the first post."""
        for member in range(1, self.n_members):
            thread = threading.Thread(target=follow, args=(member,), name=f"llamatrio-cpu-{member}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._view(STOP)[0] = 1
        self._view(GENERATION)[0] += 1
        for member, pipe in enumerate(self._pipes, start=1):
            # A byte that nobody reads does no harm now, so there is nothing to settle by Rule 3.
            self._view(MEMBERS + member * MEMBER_BYTES + STATE)[0] = _AWAKE
            os.write(pipe[1], b"x")
        for thread in self._threads:
            thread.join()
        for pipe in self._pipes:
            os.close(pipe[0])
            os.close(pipe[1])
        self._threads, self._pipes = [], []

    def _view(self, offset: int) -> NDArray[np.int64]:
        start = (self.address + offset - self._words.ctypes.data) // 8
        return self._words[start : start + 8]
