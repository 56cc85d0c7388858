"""The matrix products: out[m][n] = x[m][k] · W[n][k], over packed weights (pack.py).

Threads share a product by groups: group g is the 16 columns 16 g .. 16 g + 15 of the output, and a kernel computes
the groups [g0, g1). All arguments are i64, addresses and distances in bytes.

    rows(w, x, out, m, k, ld_out, g0, g1)
        x in the form `rows_form` (activations.py). For decoding, and for prompts where there is no panel kernel.
    panel(w, x, out, scratch, m, k, ld_out, g0, g1)
        x in the form `panel_form`. For prompts. `scratch`: panel.scratch_bytes(k) bytes a thread, 64-byte aligned.
        Two groups are taken at a time: give threads even borders where possible.
    embed(w, row, out, k)
        Row `row` of W as f32 [k]: the token embedding is stored as any other matrix.

`ld_out` is the distance between rows of the output, best taken from `row_stride`. Whole groups of 16 columns are
written, so an output row has room for n rounded up to 16. A row's result depends neither on m nor on the other rows nor
on its place among them: not in one bit. rows and panel round differently, so what decides between them must not depend
on the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from llamatrio.backends.cpu.activations import PanelForm
from llamatrio.backends.cpu.compile import Emit, compile_kernel
from llamatrio.backends.cpu.formats import ROWS, Format
from llamatrio.backends.cpu.formats_float import FloatFormat
from llamatrio.backends.cpu.levels import Level, current_level
from llamatrio.backends.cpu.pack import Packing, format_of
from llamatrio.backends.cpu.panel import panel_kernel
from llamatrio.backends.cpu.rows import float_rows, for_each_tile, quantized_rows
from llamatrio.backends.cpu.vector import Asm, Value, vi32
from llamatrio.model.ggml_type import GGMLType


def row_stride(n: int) -> int:
    """Bytes between rows of an output of `n` columns: room for whole groups, and an odd number of 64-byte lines.

    With an even number, above all a power of two, the rows of a tile fall into few sets of the cache; storing the
    output of a panel product was seen to take a third longer.
    """
    return 64 * (-(-n // ROWS) | 1)


@dataclass(frozen=True, slots=True)
class LinearKernels:
    """Addresses of the kernels for matrices of one type at one level."""

    rows: int
    rows_form: Literal["q8", "f32"]
    panel: int | None
    """None where rows is the better (or the only) way for prompts too."""
    panel_form: PanelForm = "bf16"


def linear_kernels(packing: Packing, level: Level | None = None) -> LinearKernels:
    """Compiles (or finds) the product kernels of a packing, for `level` (default: current_level())."""
    level, made = level or current_level(), format_of(packing)
    quantized = isinstance(made, Format)
    rows = quantized_rows(made) if isinstance(made, Format) else float_rows(made)
    has_panel = level.has_amx and made.type != GGMLType.F32  # f32 weights are there for their precision
    return LinearKernels(
        rows=compile_kernel(f"rows_{made.name}", rows, level),
        rows_form="q8" if quantized else "f32",
        panel=compile_kernel(f"panel_{made.name}", panel_kernel(made), level) if has_panel else None,
        panel_form="f16" if made.type == GGMLType.F16 else "bf16",
    )


def embed_kernel(packing: Packing, level: Level | None = None) -> int:
    """Address of the embed kernel of a packing."""
    made = format_of(packing)
    emit = _embed_quantized(made) if isinstance(made, Format) else _embed_float(made)
    return compile_kernel(f"embed_{made.name}", emit, level)


def _embed_quantized(made: Format) -> Emit:
    def emit(asm: Asm, w: Value, row: Value, out: Value, k: Value) -> None:
        b = asm.builder
        weights, lane = _group_and_lane(asm, made, w, row, k)
        target = asm.pointer(out)

        def step(offset: Value, index: Value, head: list[Value], carried: list[Value]) -> list[Value]:
            codes, scales, minima = made.unpack(asm, weights, offset, head)
            scale = [asm.lane(v, lane) for v in scales]
            minimum = [asm.lane(v, lane) for v in minima]
            for v, quad in enumerate(codes):
                word = asm.lane(asm.bitcast(quad, vi32), lane)
                half = v * len(scales) // 8
                for c in range(4):
                    code = asm.to_f32(b.and_(b.lshr(word, asm.int32(8 * c)), asm.int32(0xFF)))
                    value = asm.fma(scale[half], code, minimum[half])
                    asm.store(value, target, asm.add(asm.mul(index, 128), 16 * v + 4 * c))
            return []

        for_each_tile(asm, made, weights, k, [], step)

    return emit


def _embed_float(made: FloatFormat) -> Emit:
    def emit(asm: Asm, w: Value, row: Value, out: Value, k: Value) -> None:
        weights, lane = _group_and_lane(asm, made, w, row, k)
        target = asm.pointer(out)

        def tile(i: Value, _: list[Value]) -> list[Value]:
            for pair in range(16):
                for parity, v in enumerate(made.load_pair(asm, weights, asm.mul(i, made.tile_bytes), pair)):
                    asm.store(asm.lane(v, lane), target, asm.add(asm.mul(i, 128), 8 * pair + 4 * parity))
            return []

        asm.loop(0, asm.div(k, 32), [], tile)

    return emit


def _group_and_lane(asm: Asm, made: Format | FloatFormat, w: Value, row: Value, k: Value) -> tuple[Value, Value]:
    """Where the group of row `row` starts, and the row's lane (i32) in it."""
    group = asm.at(asm.pointer(w), asm.mul(asm.div(row, ROWS), made.row_bytes(asm, k)))
    return group, asm.builder.trunc(asm.builder.and_(row, asm.int64(ROWS - 1)), asm.int32(0).type)
