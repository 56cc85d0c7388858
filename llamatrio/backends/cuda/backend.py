"""The CUDA backend: a model on a device, a compute stream for steps, and a copy stream for saves and restores.

All memory is planned before any is allocated: one arena on the device for weights, KV cells and scratch, and pinned
buffers on the host. Kernels are compiled and decode graphs captured at start, too. After that the driver is only ever
asked to enqueue: nothing allocates, and no thread but the completion threads (completion.py) waits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from llamatrio import config
from llamatrio.backends.base import Gather, StagingBuffer
from llamatrio.backends.cuda.compiler import KernelLoader
from llamatrio.backends.cuda.completion import completions
from llamatrio.backends.cuda.device import Gpu, driver_errors, open_gpu
from llamatrio.backends.cuda.forward import DeviceModel
from llamatrio.backends.cuda.graphs import KernelsOnly, decode_graphs
from llamatrio.backends.cuda.kernels.launcher import Launcher
from llamatrio.backends.cuda.memory import MIB, DeviceArena, aligned, device_arena, pinned_memory
from llamatrio.backends.cuda.passes import PromptPass, choose
from llamatrio.backends.cuda.plan import StepPlan, check_batch
from llamatrio.backends.cuda.shape import (
    MOST_CANDIDATES,
    Limits,
    check_spec,
    head_shape,
    kv_layout,
    pool_shape,
    scratch_sizes,
)
from llamatrio.backends.cuda.step import Steps, step_slots
from llamatrio.backends.cuda.transfer import CellTransfer, CudaStaging
from llamatrio.backends.cuda.weights import HALF_BYTES, ModelWeights, Uploader, WeightLoader, weight_sizes
from llamatrio.backends.memory import MemoryPlan, check_memory
from llamatrio.errors import BackendError
from llamatrio.model.arch import spec_from_gguf
from llamatrio.model.gguf import GGUFFile, open_gguf
from llamatrio.model.spec import KVLayout, KVType, ModelSpec
from llamatrio.progress import Progress
from llamatrio.sched.types import Batch, Int32Array, StepOutput

_log = logging.getLogger("llamatrio.engine")

N_SLOTS = 2
"""Steps that may be in flight."""
RESERVE_BYTES = 256 * MIB
"""Device memory left alone: staging buffers, graphs, code, and what the desktop may want."""


class CudaBackend:
    """A Backend (backends/base.py) on an NVIDIA GPU. Made by `open_cuda_backend`."""

    def __init__(
        self,
        gpu: Gpu,
        model: DeviceModel,
        layout: KVLayout,
        steps: Steps,
        transfer: CellTransfer,
        *,
        staging: ExitStack,
        owned: ExitStack,
    ) -> None:
        """staging keeps the staging buffers; owned keeps everything, that included, and is closed by `close`."""
        self._gpu, self._model, self._layout, self._steps, self._transfer = gpu, model, layout, steps, transfer
        self._staging, self._owned = staging, owned
        self._device = f"CUDA, {gpu.name}, {gpu.memory().total // MIB} MiB"
        self._is_closed = False

    @property
    def spec(self) -> ModelSpec:
        return self._model.spec

    @property
    def layout(self) -> KVLayout:
        return self._layout

    @property
    def n_cells(self) -> int:
        return self._model.limits.n_cells

    @property
    def max_rows(self) -> int:
        return self._model.limits.max_rows

    @property
    def device(self) -> str:
        return self._device

    def forward(self, batch: Batch) -> Future[StepOutput]:
        """Queues a step. Raises ValueError for a batch that does not fit the backend."""
        self._check_open()
        check_batch(batch, self.spec.n_vocab, self._model.limits)
        if not 1 <= batch.n_candidates <= min(MOST_CANDIDATES, self.spec.n_vocab):
            raise ValueError(f"expected 1 to {MOST_CANDIDATES} candidates, not {batch.n_candidates}")
        return self._steps.forward(batch)

    def gather_cells(self, cells: Int32Array, staging: StagingBuffer) -> Gather:
        """Queues copying `cells` [n] into the first n records of `staging`; the cells are free at once."""
        return self._transfer.gather(*self._checked_cells(cells, staging))

    def scatter_cells(self, staging: StagingBuffer, cells: Int32Array) -> Future[None]:
        """Queues copying the first n records of `staging` into `cells` [n], which are distinct."""
        wanted, buffer = self._checked_cells(cells, staging)
        return self._transfer.scatter(buffer, wanted)

    @property
    def needs_staging(self) -> bool:
        return True

    @property
    def takes_every_core(self) -> bool:
        return False

    def new_staging(self, n_records: int) -> CudaStaging:
        """Pinned memory and its counterpart on the device. Raises BackendError when memory is short."""
        if n_records < 1:
            raise ValueError(f"expected at least 1 record, not {n_records}")
        self._check_open()
        return self._transfer.new_staging(n_records, self._staging)

    def close(self) -> None:
        """Waits for what is queued and frees the device. Idempotent; `open_cuda_backend` calls it on leaving."""
        if not self._is_closed:
            self._is_closed = True
            self._gpu.enter()
            self._owned.close()

    def _checked_cells(self, cells: Int32Array, staging: StagingBuffer) -> tuple[Int32Array, CudaStaging]:
        self._check_open()
        wanted = np.ascontiguousarray(cells, np.int32)
        if wanted.ndim != 1 or len(wanted) > staging.capacity:
            raise ValueError(f"expected at most {staging.capacity} cells, not {cells.shape}")
        if len(wanted) and not 0 <= wanted.min() <= wanted.max() < self.n_cells:
            raise ValueError(f"expected cells below {self.n_cells}, not {wanted.min()} to {wanted.max()}")
        if not isinstance(staging, CudaStaging):
            raise ValueError("expected a staging buffer that this backend made")
        return wanted, staging

    def _check_open(self) -> None:
        if self._is_closed:
            raise BackendError("the CUDA backend is closed")
        self._gpu.enter()


@contextmanager
def open_cuda_backend(
    model: str | Path | GGUFFile,
    spec: ModelSpec | None = None,
    *,
    n_cells: int,
    n_lanes: int = 1,
    n_ctx: int = 0,
    type_k: KVType = "f16",
    type_v: KVType = "f16",
    max_rows: int = 512,
    n_gpu_layers: int = 99,
    on_progress: Progress | None = None,
) -> Iterator[CudaBackend]:
    """Loads a model onto the GPU; on leaving, waits for queued work and frees everything.

    Args:
        model: a path, or an open file (which the caller closes; it is not needed after loading).
        spec: of the open file; None reads it.
        n_cells: size of the KV pool.
        n_lanes: sequences that may be in one step.
        n_ctx: most tokens of a sequence, which decides over long rope factors; 0: n_cells.
        max_rows: most rows of one batch.
        n_gpu_layers: all of the model's layers or more (or below 0).
        on_progress: told of the bytes loaded; a bar or lines of the log when None.

    Raises:
        BackendUnavailableError: no driver, no device, one that is too old, or no NVRTC.
        ModelError: the file is damaged or asks for what the kernels do not have.
        BackendError: not enough memory (the message says what would fit), some layers only, or the driver failed.
        ValueError: an argument is out of range.
    """
    if n_cells < 1 or n_lanes < 1 or n_ctx < 0 or max_rows < 1:
        raise ValueError(f"expected counts of at least 1, not {n_cells=} {n_lanes=} {n_ctx=} {max_rows=}")
    limits = Limits(n_cells, n_lanes, max(max_rows, n_lanes))
    with ExitStack() as owned:
        file = model if isinstance(model, GGUFFile) else owned.enter_context(open_gguf(model))
        spec = spec or spec_from_gguf(file)
        check_layers(spec, n_gpu_layers)
        check_spec(spec)
        backend = _open(file, spec, limits, n_ctx or n_cells, type_k, type_v, on_progress, owned)
        try:
            yield backend
        finally:
            backend.close()


def check_layers(spec: ModelSpec, n_gpu_layers: int) -> None:
    """Raises BackendError unless all layers are wanted on the GPU; 99 means all, as everywhere."""
    if 0 <= n_gpu_layers < min(spec.n_layer, 99):
        raise BackendError(
            f"n_gpu_layers is {n_gpu_layers}, but the model's {spec.n_layer} layers run on the GPU all or not at all: "
            f"use -ngl {spec.n_layer} or more, or --device cpu"
        )


def _open(
    file: GGUFFile,
    spec: ModelSpec,
    limits: Limits,
    n_ctx: int,
    type_k: KVType,
    type_v: KVType,
    on_progress: Progress | None,
    owned: ExitStack,
) -> CudaBackend:
    """Everything is entered into `owned` in such an order that on leaving queued work ends before memory is freed."""
    heads = head_shape(spec, type_k, type_v)
    layout = kv_layout(spec, heads)
    gpu = owned.enter_context(open_gpu())
    plan = plan_memory(file, spec, type_k, type_v, limits, gpu.memory().free - RESERVE_BYTES)
    arena = owned.enter_context(device_arena(gpu, plan.total, "the model"))
    loader = KernelLoader(gpu.arch, config.cache_dir() / "kernels")
    run = Launcher(loader, gpu.compute)
    with driver_errors("the model cannot be loaded"):
        weights = _load_weights(file, spec, gpu, arena, plan.weights, run, n_ctx, on_progress)
        shape = pool_shape(layout, limits.n_cells)
        sizes = scratch_sizes(spec, heads, limits)
        pool, scratch = arena.take(shape.nbytes), sizes.placed(arena)
        if spec.n_expert:  # padding rows have no experts that would write their gates
            arena.view(scratch.gates, sizes.gates).fill(0, stream=gpu.compute)
        model = DeviceModel(spec, weights, heads, pool, shape, scratch, limits)
        slots = owned.enter_context(step_slots(gpu, model, N_SLOTS))
        staging = owned.enter_context(ExitStack())
        _log.info("preparing kernels for %s (the first start compiles them)", gpu.arch)
        graphs = owned.enter_context(decode_graphs(gpu, loader, model))
        _load_prompt_kernels(model, loader)
        done = owned.enter_context(completions(gpu, "compute"))
        transfer = CellTransfer(gpu, loader, pool, shape, owned.enter_context(completions(gpu, "copy")))
        transfer.load_kernels()
    steps = Steps(gpu, model, arena, graphs, run, slots, done)
    return CudaBackend(gpu, model, layout, steps, transfer, staging=staging, owned=owned.pop_all())


def plan_memory(
    file: GGUFFile, spec: ModelSpec, type_k: KVType, type_v: KVType, limits: Limits, available: int
) -> MemoryPlan:
    """The whole arena. Raises BackendError where the device does not have the memory, naming what would fit."""
    heads, sizes = head_shape(spec, type_k, type_v), weight_sizes(file, spec)
    layout = kv_layout(spec, heads)

    def plan(n_cells: int) -> MemoryPlan:
        cells = aligned(pool_shape(layout, n_cells).nbytes)
        scratch = scratch_sizes(spec, heads, limits._replace(n_cells=n_cells)).nbytes
        return MemoryPlan(sizes.stored, max(scratch, sizes.load_area - cells), cells)

    return check_memory(plan, limits.n_cells, available)


def _load_weights(
    file: GGUFFile,
    spec: ModelSpec,
    gpu: Gpu,
    arena: DeviceArena,
    n_stored: int,
    run: Launcher,
    n_ctx: int,
    on_progress: Progress | None,
) -> ModelWeights:
    """The weights at the front of the arena; what lies behind them is the load area."""
    with ExitStack() as loading:
        pinned = loading.enter_context(pinned_memory(2 * HALF_BYTES, "loading"))
        owner = loading.enter_context(ExitStack())
        uploader = Uploader(gpu, pinned, arena, loading.enter_context(completions(gpu, "load")), owner)
        return WeightLoader(file, spec, arena, arena.address + n_stored, uploader, run, n_ctx, on_progress).load()


def _load_prompt_kernels(model: DeviceModel, loader: KernelLoader) -> None:
    """Compiles and loads what prompts of any length launch, so that no step does."""
    dry = KernelsOnly(loader)
    for rows in sorted(_sizes_of_every_tile(model)):
        plan = StepPlan(0, 0, 0, rows, 1, 0, 0, 0, rows, np.empty(0, np.int64))
        prompt = PromptPass(model, dry, plan)
        prompt.enqueue()
        prompt.wanted_logits(0, min(rows, model.limits.n_logits))
    choose(model, dry, n_rows=1, k=1, ids=0, values=0, sums=0)


def _sizes_of_every_tile(model: DeviceModel) -> set[int]:
    """Rows of prompts that between them use tiles of 16, 64 and 128 rows, for whole matrices and for experts."""
    spec, most = model.spec, model.limits.max_rows
    sizes = {1, 17, 65}
    if spec.n_expert:
        sizes |= {-(-n * spec.n_expert // spec.n_expert_used) for n in (1, 17, 65)}
    return {min(n, most) for n in sizes}
