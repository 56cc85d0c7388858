"""The CPU backend: a model in one arena, a compute thread with its team, and two copy threads.

Two queues, as the Backend protocol has them. *compute* is one thread, member 0 of the team, which runs the steps in
order (compute.py). *copy* is two threads, which move cells to and from records while steps run, a slice at a time: one
for saves and one for restores, for which somebody waits. Their priority is not low: where the team has all cores that
would mean milliseconds until a slice of microseconds gets its turn. A gather waits for the step queued last before it,
so it reads what those steps wrote. A scatter needs no order: its cells are nobody else's until it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from llamatrio import config
from llamatrio.backends.base import Gather, StagingBuffer
from llamatrio.backends.cpu.arena import Arena, padded
from llamatrio.backends.cpu.cells import CellPool, kv_layout
from llamatrio.backends.cpu.compute import ComputeThread
from llamatrio.backends.cpu.levels import Level, current_level
from llamatrio.backends.cpu.machine import Machine, attention_shapes, build_machine, check_spec
from llamatrio.backends.cpu.memory import available_bytes
from llamatrio.backends.cpu.populate import Populator, Region, in_turns
from llamatrio.backends.cpu.scratch import MOST_CANDIDATES, ScratchPlan, plan_scratch
from llamatrio.backends.cpu.step import compiled_step
from llamatrio.backends.cpu.team import Team
from llamatrio.backends.cpu.weights import check_weights, weights_bytes
from llamatrio.backends.memory import MemoryPlan, check_memory
from llamatrio.errors import BackendError
from llamatrio.model.arch import spec_from_gguf
from llamatrio.model.gguf import GGUFFile, open_gguf
from llamatrio.model.spec import KVLayout, KVType, ModelSpec
from llamatrio.sched.types import Batch, Int32Array, StepOutput


class CpuBackend:
    """A Backend (backends/base.py) on this machine's processor. Made by `open_cpu_backend`."""

    def __init__(self, spec: ModelSpec, machine: Machine, compute: ComputeThread, level: Level, max_rows: int) -> None:
        self._spec, self._machine, self._compute, self._level, self._max_rows = spec, machine, compute, level, max_rows
        self._gathers = ThreadPoolExecutor(1, thread_name_prefix="llamatrio-gather")
        self._scatters = ThreadPoolExecutor(1, thread_name_prefix="llamatrio-scatter")
        self._takes_every_core = compute.n_threads >= config.n_usable_cores()
        self._last_step: Future[StepOutput] | None = None
        self._is_closed = False

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def layout(self) -> KVLayout:
        return self._machine.pool.layout

    @property
    def n_cells(self) -> int:
        return self._machine.pool.n_cells

    @property
    def max_rows(self) -> int:
        return self._max_rows

    @property
    def device(self) -> str:
        return f"CPU, {self._level.name} kernels, {self._compute.n_threads} threads"

    @property
    def needs_staging(self) -> bool:
        return False

    @property
    def takes_every_core(self) -> bool:
        return self._takes_every_core

    def forward(self, batch: Batch) -> Future[StepOutput]:
        """Queues a step. Raises ValueError for a batch that does not fit the backend."""
        self._check_open()
        _check_batch(batch, self._spec, self._max_rows, self.n_cells)
        self._last_step = self._compute.submit(batch)
        return self._last_step

    def gather_cells(self, cells: Int32Array, staging: StagingBuffer) -> Gather:
        """Queues copying `cells` [n] into the first n records of `staging`, after the steps queued so far."""
        wanted = self._checked_cells(cells, staging)
        done = self._gathers.submit(self._gather, wanted, staging, self._last_step)
        return Gather(cells_free=done, landed=done)

    def scatter_cells(self, staging: StagingBuffer, cells: Int32Array) -> Future[None]:
        """Queues copying the first n records of `staging` into `cells` [n]."""
        wanted = self._checked_cells(cells, staging)
        return self._scatters.submit(self._scatter, staging, wanted)

    def new_staging(self, n_records: int) -> StagingBuffer:
        """Ordinary memory, for whoever wants some: nothing needs pinning here."""
        if n_records < 1:
            raise ValueError(f"expected at least 1 record, not {n_records}")
        return StagingBuffer(np.zeros((n_records, self.layout.record_bytes), np.uint8))

    def close(self) -> None:
        """Waits for what is queued. Idempotent; `open_cpu_backend` calls it on leaving."""
        self._is_closed = True
        if self._last_step is not None:
            self._last_step.exception()
        self._gathers.shutdown()
        self._scatters.shutdown()

    def _gather(self, cells: Int32Array, staging: StagingBuffer, after: Future[StepOutput] | None) -> None:
        if after is not None:
            after.exception()  # waits; a failed step leaves its own cells undefined and the others as they were
        self._machine.pool.gather(cells, staging.records, self._compute.save_pause_us)

    def _scatter(self, staging: StagingBuffer, cells: Int32Array) -> None:
        self._machine.pool.scatter(staging.records, cells, self._compute.restore_pause_us)

    def _checked_cells(self, cells: Int32Array, staging: StagingBuffer) -> Int32Array:
        self._check_open()
        wanted = np.ascontiguousarray(cells, np.int32)
        if wanted.ndim != 1 or len(wanted) > staging.capacity:
            raise ValueError(f"expected at most {staging.capacity} cells, not {cells.shape}")
        if len(wanted) and not 0 <= wanted.min() <= wanted.max() < self.n_cells:
            raise ValueError(f"expected cells below {self.n_cells}, not {wanted.min()} to {wanted.max()}")
        if staging.records.shape[1:] != (self.layout.record_bytes,) or not staging.records.flags.c_contiguous:
            raise ValueError(f"expected contiguous records of {self.layout.record_bytes} bytes")
        return wanted

    def _check_open(self) -> None:
        if self._is_closed:
            raise BackendError("the CPU backend is closed")


def _check_batch(batch: Batch, spec: ModelSpec, max_rows: int, n_cells: int) -> None:
    n = batch.n_rows
    if not 1 <= n <= max_rows:
        raise ValueError(f"expected 1 to {max_rows} rows, not {n}")
    if not len(batch.positions) == len(batch.lanes) == len(batch.cells) == n:
        raise ValueError(f"expected {n} positions, lanes and cells")
    if sum(run.n_rows for run in batch.runs) != n:
        raise ValueError(f"expected runs that cover {n} rows, not {sum(run.n_rows for run in batch.runs)}")
    if not _are_below(batch.tokens, spec.n_vocab):
        raise ValueError(f"expected tokens below {spec.n_vocab}, not {batch.tokens.min()} to {batch.tokens.max()}")
    if not _are_below(batch.positions, min(n_cells, batch.cell_table.shape[1])):
        raise ValueError(f"expected positions below {min(n_cells, batch.cell_table.shape[1])}")
    if not _are_below(batch.cells, n_cells):
        raise ValueError(f"expected cells below {n_cells}, not {batch.cells.min()} to {batch.cells.max()}")
    if batch.cell_table.dtype != np.int32 or batch.cell_table.strides[1] != 4:
        raise ValueError("expected cell_table to be int32 with contiguous rows")
    if not 1 <= batch.n_candidates <= min(MOST_CANDIDATES, spec.n_vocab):
        raise ValueError(f"expected 1 to {MOST_CANDIDATES} candidates, not {batch.n_candidates}")


def _are_below(values: Int32Array, limit: int) -> bool:
    numbers: list[int] = values.tolist()  # a step of tokens has a few: NumPy's reductions take longer
    return min(numbers) >= 0 and max(numbers) < limit


@contextmanager
def open_cpu_backend(
    model: str | Path | GGUFFile,
    spec: ModelSpec | None = None,
    *,
    n_cells: int,
    n_lanes: int = 1,
    n_ctx: int = 0,
    type_k: KVType = "f16",
    type_v: KVType = "f16",
    n_threads: int = 0,
    max_rows: int = 512,
) -> Iterator[CpuBackend]:
    """Loads a model for the processor; on leaving, waits for queued work and frees everything.

    Args:
        model: a path, or an open file (which the caller closes; it is not needed after loading).
        spec: of the open file; None reads it.
        n_cells: size of the KV pool.
        n_lanes: sequences that may decode in one step.
        n_ctx: most tokens of a sequence, which decides over long rope factors; 0: n_cells.
        n_threads: 0 takes the usable cores.
        max_rows: most rows of one batch.

    Raises:
        ModelError: the file is damaged or asks for what the kernels do not have.
        BackendError: not enough memory; the message says what would fit.
        ValueError: an argument is out of range.
    """
    if n_cells < 1 or n_lanes < 1 or n_ctx < 0 or n_threads < 0 or max_rows < 1:
        raise ValueError(f"expected counts of at least 1, not {n_cells=} {n_lanes=} {n_ctx=} {n_threads=} {max_rows=}")
    n_threads, max_rows, level = n_threads or config.n_usable_cores(), max(max_rows, n_lanes), current_level()
    with ExitStack() as stack:
        file = model if isinstance(model, GGUFFile) else stack.enter_context(open_gguf(model))
        spec = spec or spec_from_gguf(file)
        check_spec(spec, type_k, type_v)
        check_weights(file, spec)
        layout = kv_layout(spec, type_k, type_v)
        shapes = attention_shapes(spec, type_k, type_v, level)
        plan_for = partial(plan_scratch, spec, shapes, max_rows=max_rows, n_threads=n_threads)
        memory = _plan_memory(file, spec, layout, plan_for, n_cells)
        arena = stack.enter_context(Arena(memory.total))
        pool = CellPool(layout, n_cells, arena.take(n_cells * layout.record_bytes), level)
        team = stack.enter_context(Team(n_threads))
        with ThreadPoolExecutor(1, thread_name_prefix="llamatrio-compile") as compiler:
            # Compiling is Python most of the time, loading and the kernels' compilation are not: they overlap.
            step = compiler.submit(compiled_step)
            machine = build_machine(file, spec, arena, pool, shapes, plan_for(n_cells), team, level, n_ctx or n_cells)
            compiled = step.result()
        compute = stack.enter_context(ComputeThread(machine, team, compiled))
        backend = CpuBackend(spec, machine, compute, level, max_rows)
        stack.callback(backend.close)
        behind_weights = Region(arena.address + arena.n_bytes - memory.scratch, memory.scratch)
        stack.enter_context(Populator(in_turns([[behind_weights], pool.regions()]), lambda: compute.is_busy))
        yield backend


def _plan_memory(
    file: GGUFFile, spec: ModelSpec, layout: KVLayout, plan_for: Callable[[int], ScratchPlan], n_cells: int
) -> MemoryPlan:
    """The whole arena. Raises BackendError where the machine does not have the memory."""
    n_weights = weights_bytes(file, spec)

    def plan(n: int) -> MemoryPlan:
        n_rope = 2 * padded(4 * n * spec.rope.n_dims)
        return MemoryPlan(n_weights, plan_for(n).n_bytes + n_rope, padded(n * layout.record_bytes))

    return check_memory(plan, n_cells, available_bytes())
