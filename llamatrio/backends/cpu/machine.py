"""Everything that the compiled step runs on: weights, cells and scratch in the arena, and the tables that name them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamatrio.backends.cpu import attention as att
from llamatrio.backends.cpu import flash, ops, sketch, whole_rows
from llamatrio.backends.cpu import tables as t
from llamatrio.backends.cpu.activations import panel_rows_kernel, quantize_rows_kernel
from llamatrio.backends.cpu.arena import Arena, padded
from llamatrio.backends.cpu.attention_states import finish_states, merge_states, state_bytes
from llamatrio.backends.cpu.cells import CellPool
from llamatrio.backends.cpu.compile import Emit, compile_kernel
from llamatrio.backends.cpu.kv_rows import CHUNK, AttentionShape
from llamatrio.backends.cpu.levels import Level
from llamatrio.backends.cpu.linear import row_stride
from llamatrio.backends.cpu.plan import LEAST_PANEL_ROWS, LEAST_SPAN_ROWS, Plan, plan_rows
from llamatrio.backends.cpu.rope_table import RopeTable
from llamatrio.backends.cpu.rows import quantized_rows
from llamatrio.backends.cpu.scratch import HEAD_ROWS, ScratchPlan, n_padded_logits, n_qkv
from llamatrio.backends.cpu.screen import MOST_SCREENED
from llamatrio.backends.cpu.team import Team
from llamatrio.backends.cpu.weights import Int64Array, LoadedWeights, load_weights
from llamatrio.errors import UnsupportedModelError
from llamatrio.model.gguf import GGUFFile
from llamatrio.model.quants import dequantize
from llamatrio.model.rope import factors_name
from llamatrio.model.spec import KVType, ModelSpec, mixes_keys
from llamatrio.sched.types import Batch, FloatArray, Int32Array, StepOutput

_INT32_LISTS = (t.TOKENS, t.POSITIONS, t.CELLS, t.OUT_ROWS, t.FULL_PLACES, t.TOP_IDS, t.TOP_LOGITS, t.LOG_SUMS)
"""Shared buffers of 4-byte words that a step's work is written to and its results are read from."""

_LONGEST_PAUSE = 512
"""Steps that read the whole head before its sketch is tried again."""


def check_spec(spec: ModelSpec, type_k: KVType, type_v: KVType) -> None:
    """Raises UnsupportedModelError for features that the kernels lack, and for sizes that they cannot take."""
    lacking = {"mixtures of experts": spec.n_expert, "attention sinks": spec.has_sinks}
    if missing := [what for what, is_wanted in lacking.items() if is_wanted]:
        raise UnsupportedModelError(
            f"the CPU backend has no {' and no '.join(missing)}, which {spec.arch} needs; the CUDA backend runs it"
        )
    if spec.head_dim % 16:
        raise UnsupportedModelError(f"the CPU needs a head size that is a multiple of 16, not {spec.head_dim}")
    if "q8_0" in (type_k, type_v) and spec.head_dim % 32:
        raise UnsupportedModelError(f"a q8_0 KV cache needs a head size of a multiple of 32, not {spec.head_dim}")
    for name, n in (("n_embd", spec.n_embd), ("n_ff", spec.n_ff), ("n_head * head_dim", spec.n_head * spec.head_dim)):
        if n % 32:
            raise UnsupportedModelError(f"the CPU needs {name} to be a multiple of 32, not {n}")


def attention_shapes(spec: ModelSpec, type_k: KVType, type_v: KVType, level: Level) -> list[AttentionShape]:
    """The attention kernels of a group of query heads, in order of heads."""
    group = spec.n_head // spec.n_head_kv
    return [
        AttentionShape(spec.head_dim, spec.n_head_kv, n, type_k, type_v, spec.attn_softcap > 0)
        for n in att.head_batches(group, level)
    ]


@dataclass(slots=True, eq=False)
class StepResults:
    """Where the step in flight leaves its results; read before the next step is loaded."""

    top_ids: Int32Array
    top_logits: FloatArray
    log_sums: FloatArray
    full: FloatArray
    n_vocab: int

    def step_output(self, seconds: float) -> StepOutput:
        """A copy of the results."""
        return StepOutput(
            ids=self.top_ids.copy(),
            logits=self.top_logits.copy(),
            logsumexp=self.log_sums.copy(),
            full=np.ascontiguousarray(self.full[:, : self.n_vocab]),
            seconds=seconds,
        )


class Machine:
    """The tables and the buffers behind them. Owned by the compute thread once it runs."""

    def __init__(
        self,
        spec: ModelSpec,
        pool: CellPool,
        loaded: LoadedWeights,
        scratch: ScratchPlan,
        batches: Int64Array,
        step: Int64Array,
        ropes: list[RopeTable],
        buffers: dict[int, NDArray[np.uint8]],
    ) -> None:
        self.spec, self.pool, self.scratch = spec, pool, scratch
        self.step, self.layers, self.matrices, self.batches = step, loaded.layers, loaded.matrices, batches
        self.has_panels = loaded.has_panels
        self._ropes = ropes
        self._lists = {field: buffers[field].view(np.int32) for field in _INT32_LISTS}
        self._cell_lists, self._spans = buffers[t.CELL_LISTS].view(np.int64), buffers[t.SPANS].view(np.int64)
        self._screening = _Screening(buffers[t.N_SCORED].view(np.int64)[:1], spec.n_vocab)
        self._cell_table: Int32Array | None = None
        """The table of the last step: its address is kept, since asking NumPy for it takes long."""
        self._cell_table_address = 0

    def plan(self, batch: Batch) -> Plan:
        """How the step will see the rows of `batch`."""
        group = self.spec.n_head // self.spec.n_head_kv
        least = LEAST_PANEL_ROWS if self.has_panels else LEAST_SPAN_ROWS if self._has_flash else None
        return plan_rows(batch, least_span_rows=least, most_span_rows=flash.most_span_rows(group))

    def load_batch(self, batch: Batch, plan: Plan) -> StepResults:
        """Writes one step's work into the tables; the results are there once the step has run."""
        # Every stream waits for this in every step: few calls, and none for what a batch of tokens does not need.
        step, n = self.step, batch.n_rows
        rows = _internal_rows(batch, plan.order)
        last = max(run.pos0 + run.n_rows for run in batch.runs) - 1
        for rope in self._ropes:
            rope.reach(last)
        self._lists[t.TOKENS][:n] = rows.tokens
        self._lists[t.POSITIONS][:n] = rows.positions
        self._lists[t.CELLS][:n] = rows.cells
        self._cell_lists[:n] = self._lists_of(batch.cell_table, rows.lanes)
        n_panel = n - plan.n_lone if self.has_panels else 0
        step[t.N_ROWS], step[t.N_PANEL], step[t.N_LONE] = n - n_panel, n_panel, plan.n_lone
        spans = plan.spans if self._has_flash else ()
        step[t.N_SPANS] = len(spans)
        for i, span in enumerate(spans):
            self._spans[2 * i : 2 * i + 2] = span.row, span.n_rows
        n_chunks = sum(position // CHUNK + 1 for position in rows.positions[: plan.n_lone].tolist())
        step[t.BY_CHUNKS] = n_chunks <= self.scratch.n_chunks
        return self._load_outputs(batch, rows.out_rows)

    def _lists_of(self, cell_table: Int32Array, lanes: Int32Array) -> list[int]:
        """Addresses of these lanes' lists of cells."""
        if cell_table is not self._cell_table:
            self._cell_table, self._cell_table_address = cell_table, cell_table.ctypes.data
        start, stride = self._cell_table_address, cell_table.strides[0]
        return [start + lane * stride for lane in lanes.tolist()]

    def _load_outputs(self, batch: Batch, out_rows: Int32Array) -> StepResults:
        n_out, k, n_full = len(out_rows), batch.n_candidates, len(batch.full_rows)
        self._lists[t.OUT_ROWS][:n_out] = out_rows
        full_places = self._lists[t.FULL_PLACES]
        full_places[:n_out] = -1
        full = np.empty((n_full, self.step[t.N_LOGITS]), np.float32)
        if n_full:
            full_places[batch.full_rows] = np.arange(n_full, dtype=np.int32)
            self.step[t.FULL_OUT] = full.ctypes.data
        self.step[t.N_OUT], self.step[t.N_TOP] = n_out, k
        may_screen = self.step[t.SKETCH] and not (batch.needs_sums or n_full) and k <= MOST_SCREENED
        self.step[t.BY_SKETCH] = may_screen and self._screening.begin()
        return StepResults(
            self._lists[t.TOP_IDS][: n_out * k].reshape(n_out, k),
            self._lists[t.TOP_LOGITS].view(np.float32)[: n_out * k].reshape(n_out, k),
            self._lists[t.LOG_SUMS].view(np.float32)[:n_out],
            full,
            self.spec.n_vocab,
        )

    @property
    def _has_flash(self) -> bool:
        return bool(self.step[t.F_FLASH_CHUNK])


class _Screening:
    """Whether to read the sketch first, by how many rows of the head the last step that did so had to read after all.

    A try that does not pay is followed by a pause, twice as long each time. n_scored: int64 [1], where steps count.
    """

    def __init__(self, n_scored: Int64Array, n_vocab: int) -> None:
        self._n_scored = n_scored
        self._most = n_vocab // 3
        self._pause = 1
        """Steps."""
        self._n_paused = 0

    def begin(self) -> bool:
        """Whether the next step is to try."""
        n_scored = int(self._n_scored[0])
        self._n_scored[0] = 0
        if n_scored > self._most:
            self._n_paused = self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        elif n_scored:
            self._pause = 1
        elif self._n_paused:
            self._n_paused -= 1
        return not self._n_paused


class _Rows(NamedTuple):
    """A batch's rows in internal order."""

    tokens: Int32Array
    positions: Int32Array
    lanes: Int32Array
    cells: Int32Array
    out_rows: Int32Array


def _internal_rows(batch: Batch, order: Int32Array | None) -> _Rows:
    if order is None:
        return _Rows(batch.tokens, batch.positions, batch.lanes, batch.cells, batch.out_rows)
    places = np.empty_like(order)
    places[order] = np.arange(len(order), dtype=np.int32)
    tokens, positions, lanes, cells = (c[order] for c in (batch.tokens, batch.positions, batch.lanes, batch.cells))
    return _Rows(tokens, positions, lanes, cells, places[batch.out_rows])


def build_machine(
    file: GGUFFile,
    spec: ModelSpec,
    arena: Arena,
    pool: CellPool,
    shapes: list[AttentionShape],
    scratch: ScratchPlan,
    team: Team,
    level: Level,
    n_ctx: int,
) -> Machine:
    """Loads the weights and fills every table that does not change from step to step."""
    loaded = load_weights(file, spec, arena, level)
    ropes = _rope_tables(file, spec, arena, pool.n_cells, n_ctx)
    for layer in range(spec.n_layer):
        row = loaded.layers[layer]
        row[t.K_POOL], row[t.V_POOL] = pool.k_rows(layer), pool.v_rows(layer)
        row[t.ROPE_TABLE] = ropes[-1 if spec.is_windowed(layer) else 0].address
        row[t.WINDOW] = spec.window if spec.is_windowed(layer) else 0
    step = np.zeros(t.N_STEP_FIELDS, np.int64)
    step[t.TEAM] = team.address
    step[t.EMBEDDING], step[t.OUTPUT_NORM], step[t.SKETCH] = loaded.embedding, loaded.output_norm, loaded.sketch
    _fill(step, _dimensions(spec, shapes[0], pool))
    _fill(step, _kernels(spec, shapes[0], loaded, level))
    _fill(step, _sketch_kernels(loaded, level))
    buffers = {field: arena.take(size) for field, size in scratch.shared.items()}
    _fill(step, {field: buffer.ctypes.data for field, buffer in buffers.items()})
    _place_private(step, scratch, arena)
    return Machine(spec, pool, loaded, scratch, _batches(shapes, level), step, ropes, buffers)


def _fill(step: Int64Array, values: dict[int, int]) -> None:
    for field, value in values.items():
        step[field] = value


def _rope_tables(file: GGUFFile, spec: ModelSpec, arena: Arena, n_positions: int, n_ctx: int) -> list[RopeTable]:
    """One for all layers, or one for global layers and one for windowed layers."""
    factors = None
    name = factors_name(spec.rope, n_ctx)
    if name in file.tensors:
        factors = dequantize(file.data(name), file.tensors[name].type).ravel()
    n_tables = 2 if spec.rope.base_local else 1
    tables = []
    for i in range(n_tables):
        rows = arena.take(4 * n_positions * spec.rope.n_dims).view(np.float32).reshape(n_positions, -1)
        tables.append(RopeTable(spec.rope, factors, rows, windowed=i > 0))
    return tables


def _dimensions(spec: ModelSpec, shape: AttentionShape, pool: CellPool) -> dict[int, int]:
    bits = ops.f32_bits
    return {
        t.N_LAYER: spec.n_layer,
        t.N_EMBD: spec.n_embd,
        t.N_FF: spec.n_ff,
        t.N_HEAD: spec.n_head,
        t.N_HEAD_KV: spec.n_head_kv,
        t.HEAD_DIM: spec.head_dim,
        t.N_ROT: spec.rope.n_dims,
        t.N_VOCAB: spec.n_vocab,
        t.N_LOGITS: n_padded_logits(spec),
        t.HEAD_ROWS: HEAD_ROWS,
        t.EPS: bits(spec.norm_eps),
        t.EMBD_SCALE: bits(spec.embd_scale) if spec.embd_scale != 1 else 0,
        t.ATTN_SCALE: bits(spec.attn_scale),
        t.ATTN_CAP: bits(spec.attn_softcap),
        t.FINAL_CAP: bits(spec.final_softcap),
        t.K_STRIDE: pool.layout.k_row_bytes,
        t.V_STRIDE: pool.layout.v_row_bytes,
        t.K_IS_Q8: shape.type_k == "q8_0",
        t.V_IS_Q8: shape.type_v == "q8_0",
        t.QUERY_BYTES: att.query_bytes(shape.type_k, spec.head_dim),
        t.LD_QKV: row_stride(n_qkv(spec)),
        t.LD_LOGITS: row_stride(n_padded_logits(spec)),
        t.LD_LAYER_OUT: row_stride(spec.n_embd),
        t.STATE_BYTES: state_bytes(spec.head_dim),
    }


def _kernels(spec: ModelSpec, shape: AttentionShape, loaded: LoadedWeights, level: Level) -> dict[int, int]:
    d = spec.head_dim

    def compiled(emit: Emit, name: str = "") -> int:
        return compile_kernel(name or emit.__name__, emit, level)

    return _flash_kernels(spec, shape, level) | {
        t.F_EMBED: loaded.embed_kernel,
        t.F_QUANTIZE: quantize_rows_kernel(level),
        t.F_BF16: panel_rows_kernel(loaded.panel_form or "bf16", level),
        t.F_SCALE: compiled(ops.scale),
        t.F_ADD: compiled(ops.add),
        t.F_COPY: compiled(ops.copy),
        t.F_NORM: compiled(ops.rms_norm),
        t.F_NORM_ADD: compiled(ops.rms_norm_add),
        t.F_ROPE: compiled(ops.rope_norm if spec.rope.style == "norm" else ops.rope_neox),
        t.F_HADAMARD: compiled(ops.hadamard_blocks) if mixes_keys(shape.type_k, d) else 0,
        t.F_STORE_K: compiled(ops.store_f16 if shape.type_k == "f16" else ops.store_q8_k),
        t.F_STORE_V: compiled(ops.store_f16 if shape.type_v == "f16" else ops.store_q8_v),
        t.F_QUANTIZE_QUERY: compiled(att.quantize_query(d), f"quantize_query_{d}") if shape.type_k == "q8_0" else 0,
        t.F_MERGE: compiled(merge_states(d), f"merge_states_{d}"),
        t.F_FINISH: compiled(finish_states(d), f"finish_states_{d}"),
        t.F_GATE: compiled(ops.silu_mul if spec.activation == "silu" else ops.gelu_mul),
        t.F_SOFT_CAP: compiled(ops.soft_cap) if spec.final_softcap else 0,
        t.F_SCAN: compiled(ops.scan_logits),
    }


def _sketch_kernels(loaded: LoadedWeights, level: Level) -> dict[int, int]:
    if not loaded.sketch:
        return {}
    return {
        t.F_SKETCH: compile_kernel("rows_q8_0_sketch", quantized_rows(sketch.Q8_SKETCH), level),
        t.F_LENGTHS: sketch.lengths_kernel(level),
        t.F_MAXIMA: compile_kernel("block_maxima", ops.block_maxima, level),
        t.F_SCORE: whole_rows.score_kernel(level),
    }


def _flash_kernels(spec: ModelSpec, shape: AttentionShape, level: Level) -> dict[int, int]:
    if not flash.has_flash(shape):
        return {}
    d = spec.head_dim
    return {
        t.F_FLASH_BEGIN: compile_kernel(f"flash_begin_{shape.name}", flash.flash_begin(shape), level),
        t.F_FLASH_PACK: compile_kernel(f"flash_pack_{shape.name}", flash.flash_pack(shape), level),
        t.F_FLASH_CHUNK: compile_kernel(f"flash_chunk_{shape.name}", flash.flash_chunk(shape), level),
        t.F_FLASH_FINISH: compile_kernel(f"flash_finish_{d}", flash.flash_finish(d), level),
    }


def _batches(shapes: list[AttentionShape], level: Level) -> Int64Array:
    batches = np.zeros((len(shapes), t.N_BATCH_FIELDS), np.int64)
    first = 0
    for row, shape in zip(batches, shapes, strict=True):
        row[t.B_KERNEL] = compile_kernel(shape.name, att.attend(shape), level)
        row[t.B_FIRST_HEAD], row[t.B_HEADS] = first, shape.n_heads
        first += shape.n_heads
    return batches


def _place_private(step: Int64Array, scratch: ScratchPlan, arena: Arena) -> None:
    base = int(arena.take(scratch.n_threads * scratch.private_bytes).ctypes.data)
    step[t.PRIVATE_BYTES] = scratch.private_bytes
    for field, size in scratch.private.items():
        step[field] = base
        base += padded(size)
