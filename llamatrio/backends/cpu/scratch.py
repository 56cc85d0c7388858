"""What a backend's arena holds besides weights and cells: sizes first, so that memory is planned before it is taken."""

from __future__ import annotations

from dataclasses import dataclass

from llamatrio.backends.cpu import flash
from llamatrio.backends.cpu import tables as t
from llamatrio.backends.cpu.activations import bf16_bytes, q8_bytes
from llamatrio.backends.cpu.arena import padded
from llamatrio.backends.cpu.attention import query_bytes, scratch_bytes
from llamatrio.backends.cpu.attention_states import state_bytes
from llamatrio.backends.cpu.formats import ROWS
from llamatrio.backends.cpu.kv_rows import CHUNK, AttentionShape
from llamatrio.backends.cpu.linear import row_stride
from llamatrio.backends.cpu.panel import scratch_bytes as panel_scratch_bytes
from llamatrio.backends.cpu.products import LD_SLICE
from llamatrio.backends.cpu.screen import MOST_PROBES
from llamatrio.backends.cpu.topk import BLOCK, SEGMENT
from llamatrio.model.spec import ModelSpec

MOST_CANDIDATES = 256
HEAD_ROWS = 16
"""Rows of logits in memory at once."""
_STATE_BYTES = 16 << 20
"""States of chunks that are always worth their memory, even where no context needs them."""


@dataclass(frozen=True, slots=True)
class ScratchPlan:
    """Bytes by field of the step's table."""

    shared: dict[int, int]
    private: dict[int, int]
    """Once per thread."""
    n_threads: int
    n_chunks: int
    """Chunks of all rows together that STATES holds."""

    @property
    def private_bytes(self) -> int:
        """Bytes of one thread's buffers."""
        return sum(padded(size) for size in self.private.values())

    @property
    def n_bytes(self) -> int:
        """Bytes that everything takes from an arena."""
        return sum(padded(size) for size in self.shared.values()) + padded(self.n_threads * self.private_bytes)


def n_padded_logits(spec: ModelSpec) -> int:
    """Floats in a row of logits: the vocabulary, padded to whole blocks of the scan."""
    return -(-spec.n_vocab // BLOCK) * BLOCK


def n_qkv(spec: ModelSpec) -> int:
    """Width of Q, K and V side by side."""
    return (spec.n_head + 2 * spec.n_head_kv) * spec.head_dim


def plan_scratch(
    spec: ModelSpec, shapes: list[AttentionShape], n_cells: int, *, max_rows: int, n_threads: int
) -> ScratchPlan:
    """Sizes for batches of `max_rows` rows over at most `n_cells` positions."""
    head_state = state_bytes(spec.head_dim) * spec.n_head
    n_chunks = max(n_cells // CHUNK + 1, _STATE_BYTES // head_state)
    shared = _model_buffers(spec, shapes[0], max_rows) | _row_lists(max_rows)
    shared[t.STATES] = n_chunks * head_state
    return ScratchPlan(shared, _private_buffers(spec, shapes, max_rows), n_threads, n_chunks)


def _model_buffers(spec: ModelSpec, shape: AttentionShape, rows: int) -> dict[int, int]:
    width = spec.n_head * spec.head_dim
    widest, n_logits = max(spec.n_embd, width), n_padded_logits(spec)
    return {
        t.X_SHARED: 4 * rows * spec.n_embd,
        t.QKV: rows * row_stride(n_qkv(spec)),
        t.QUERIES: rows * spec.n_head * query_bytes(shape.type_k, spec.head_dim) if shape.type_k == "q8_0" else 0,
        t.ATTN_OUT: 4 * rows * width,
        t.LAYER_OUT: rows * row_stride(spec.n_embd),
        t.GATES: 4 * rows * spec.n_ff,
        t.UPS: 4 * rows * spec.n_ff,
        t.HIDDEN_Q8: q8_bytes(rows, spec.n_ff),
        t.HIDDEN_BF16: bf16_bytes(rows, spec.n_ff),
        t.INPUT_Q8: q8_bytes(rows, widest),
        t.INPUT_F32: 4 * rows * widest,
        t.INPUT_BF16: bf16_bytes(rows, widest),
        t.HEAD_Q8: q8_bytes(rows, spec.n_embd),
        t.HEAD_F32: 4 * rows * spec.n_embd,
        t.LOGITS: HEAD_ROWS * row_stride(n_logits),
        t.MAXIMA: 4 * HEAD_ROWS * (n_logits // BLOCK),
        t.SEGMENTS: 8 * HEAD_ROWS * -(-n_logits // SEGMENT),
        t.THRESHOLDS: 4 * HEAD_ROWS,
        t.N_SCORED: 8,
    }


def _row_lists(rows: int) -> dict[int, int]:
    lists = dict.fromkeys((t.TOKENS, t.POSITIONS, t.CELLS, t.OUT_ROWS, t.FULL_PLACES, t.LOG_SUMS), 4 * rows)
    results = dict.fromkeys((t.TOP_LOGITS, t.TOP_IDS), 4 * rows * MOST_CANDIDATES)
    return lists | results | {t.CELL_LISTS: 8 * rows, t.SPANS: 16 * rows}


def _private_buffers(spec: ModelSpec, shapes: list[AttentionShape], rows: int) -> dict[int, int]:
    width = spec.n_head * spec.head_dim
    widest, group = max(spec.n_embd, width), spec.n_head // spec.n_head_kv
    return {
        t.X_PRIVATE: 4 * t.MOST_PRIVATE_ROWS * spec.n_embd,
        t.INPUT_Q8_PRIVATE: q8_bytes(t.MOST_PRIVATE_ROWS, widest),
        t.INPUT_F32_PRIVATE: 4 * t.MOST_PRIVATE_ROWS * widest,
        t.ROW_SCRATCH: 4 * widest,
        t.STATE_SCRATCH: 2 * spec.n_head * state_bytes(spec.head_dim),
        t.ATTN_SCRATCH: max(scratch_bytes(shape) for shape in shapes),
        t.PANEL_SCRATCH: panel_scratch_bytes(max(widest, spec.n_ff)),
        t.GATE_SLICE: -(-rows // 32) * 32 * LD_SLICE,
        t.UP_SLICE: -(-rows // 32) * 32 * LD_SLICE,
        t.FLASH_QUERIES: flash.queries_bytes(spec.head_dim, group),
        t.FLASH_PACKED: flash.packed_bytes(spec.head_dim),
        t.FLASH_STATES: flash.states_bytes(spec.head_dim, group),
        t.FLASH_SCORES: flash.scores_bytes(),
        t.PROBES: 4 * 2 * (MOST_PROBES + ROWS),
        t.PROBE_LOGITS: 4 * MOST_PROBES,
        t.CANDIDATES: 4 * (SEGMENT + 2 * ROWS),
    }
