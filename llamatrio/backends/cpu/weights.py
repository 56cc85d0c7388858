"""A model's weights in the arena: packed for the kernels, in the order in which a step reads them.

The file is only mapped. Each tensor is packed straight from the mapping to its place (the packers hold no GIL, so
two threads keep the disk and a core busy each), so the file's bytes exist once more in memory, packed, and not twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamatrio.backends.cpu import tables as t
from llamatrio.backends.cpu.activations import PanelForm
from llamatrio.backends.cpu.arena import Arena, padded
from llamatrio.backends.cpu.levels import Level
from llamatrio.backends.cpu.linear import LinearKernels, linear_kernels
from llamatrio.backends.cpu.pack import check_matrix, pack, packed_bytes
from llamatrio.errors import ModelError, UnsupportedModelError
from llamatrio.model.ggml_type import GGMLType
from llamatrio.model.gguf import GGUFFile, TensorInfo
from llamatrio.model.quants import dequantize
from llamatrio.model.spec import ModelSpec

Int64Array = NDArray[np.int64]

EMBEDDING_NAME, HEAD_NAME, OUTPUT_NORM_NAME = "token_embd.weight", "output.weight", "output_norm.weight"
_N_LOADERS = 2

_VECTORS = {
    t.ATTN_NORM: "attn_norm.weight",
    t.Q_BIAS: "attn_q.bias",
    t.K_BIAS: "attn_k.bias",
    t.V_BIAS: "attn_v.bias",
    t.Q_NORM: "attn_q_norm.weight",
    t.K_NORM: "attn_k_norm.weight",
    t.POST_ATTN_NORM: "post_attention_norm.weight",
    t.FFN_NORM: "ffn_norm.weight",
    t.POST_FFN_NORM: "post_ffw_norm.weight",
}
_OPTIONAL = {t.Q_BIAS, t.K_BIAS, t.V_BIAS, t.Q_NORM, t.K_NORM, t.POST_ATTN_NORM, t.POST_FFN_NORM}


class Part(NamedTuple):
    """Rows of a tensor that the kernels see as a matrix: all of most tensors, a part of one that holds several."""

    name: str
    first: int
    n_rows: int


def layer_parts(spec: ModelSpec) -> dict[int, Part]:
    """The matrices of a layer by their index in tables.py; names without the layer's prefix."""
    n_q, n_kv, n_ff, n_embd = spec.n_head * spec.head_dim, spec.n_head_kv * spec.head_dim, spec.n_ff, spec.n_embd
    q, k, v = Part("attn_q.weight", 0, n_q), Part("attn_k.weight", 0, n_kv), Part("attn_v.weight", 0, n_kv)
    if spec.is_qkv_fused:
        q, k, v = (Part("attn_qkv.weight", *rows) for rows in ((0, n_q), (n_q, n_kv), (n_q + n_kv, n_kv)))
    gate, up = Part("ffn_gate.weight", 0, n_ff), Part("ffn_up.weight", 0, n_ff)
    if spec.is_gate_up_fused:
        gate, up = Part("ffn_up.weight", 0, n_ff), Part("ffn_up.weight", n_ff, n_ff)
    o, down = Part("attn_output.weight", 0, n_embd), Part("ffn_down.weight", 0, n_embd)
    return dict(zip((t.Q, t.K, t.V, t.O, t.GATE, t.UP, t.DOWN), (q, k, v, o, gate, up, down), strict=True))


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """Where everything lies. The arrays are tables of tables.py; the rest of `layers` is still 0."""

    layers: Int64Array
    matrices: Int64Array
    embedding: int
    embedding_type: GGMLType
    output_norm: int
    panel_form: PanelForm | None
    """The form of activations that every matrix's panel kernel reads; None where one has none, or they differ."""

    @property
    def has_panels(self) -> bool:
        """Whether prompts can take the panel path."""
        return self.panel_form is not None


def weights_bytes(file: GGUFFile, spec: ModelSpec) -> int:
    """Bytes that the weights of `file` take from an arena."""
    parts: dict[str, list[int]] = {}
    for part in layer_parts(spec).values():
        parts.setdefault(part.name, []).append(part.n_rows)
    total = 0
    for name, tensor in file.tensors.items():
        if len(tensor.shape) == 1:
            total += padded(4 * tensor.shape[0])
            continue
        n_rows = parts.get(name.split(".", 2)[-1], [tensor.shape[0]])
        total += sum(padded(packed_bytes(tensor.type, n, tensor.shape[1])) for n in n_rows)
    return total


def check_weights(file: GGUFFile, spec: ModelSpec) -> None:
    """Raises ModelError, naming the tensor, where the file lacks one or has one that the kernels do not know."""
    for layer in range(spec.n_layer):
        for part in layer_parts(spec).values():
            _check_matrix(file, f"blk.{layer}.{part.name}")
        for field, name in _VECTORS.items():
            if field not in _OPTIONAL:
                _find(file, f"blk.{layer}.{name}")
    _find(file, OUTPUT_NORM_NAME)
    _check_matrix(file, EMBEDDING_NAME)
    if not spec.tied_head:
        _check_matrix(file, HEAD_NAME)


def _find(file: GGUFFile, name: str) -> TensorInfo:
    if name not in file.tensors:
        raise ModelError(f"{file.path}: tensor {name} is missing")
    return file.tensors[name]


def _check_matrix(file: GGUFFile, name: str) -> None:
    tensor = _find(file, name)
    if len(tensor.shape) != 2:
        raise UnsupportedModelError(f"{file.path}: tensor {name} has {len(tensor.shape)} dimensions, not 2")
    check_matrix(name, tensor.type, tensor.shape[1])


def load_weights(file: GGUFFile, spec: ModelSpec, arena: Arena, level: Level) -> LoadedWeights:
    """Packs all tensors of `file` into `arena`. `check_weights` must have passed."""
    layers = np.zeros((spec.n_layer, t.N_LAYER_FIELDS), np.int64)
    matrices = np.zeros((spec.n_layer * t.N_LAYER_MATRICES + 1, t.N_MATRIX_FIELDS), np.int64)
    with ThreadPoolExecutor(_N_LOADERS, thread_name_prefix="llamatrio-load") as pool:
        loader = _Loader(file, arena, level, pool)
        for layer in range(spec.n_layer):
            prefix = f"blk.{layer}."
            for field, name in _VECTORS.items():
                if prefix + name in file.tensors:
                    layers[layer, field] = loader.vector(prefix + name)
            for index, part in layer_parts(spec).items():
                row = matrices[layer * t.N_LAYER_MATRICES + index]
                loader.matrix(part._replace(name=prefix + part.name), row)
        panel_form = _common_panel_form(loader.kernels.values())
        output_norm = loader.vector(OUTPUT_NORM_NAME)
        head = EMBEDDING_NAME if spec.tied_head else HEAD_NAME
        loader.matrix(Part(head, 0, spec.n_vocab), matrices[-1])
        embedding = int(matrices[-1, t.M_ADDRESS])
        if not spec.tied_head:
            embedding = loader.place(Part(EMBEDDING_NAME, 0, spec.n_vocab))
        loader.finish()
    embedding_type = file.tensors[EMBEDDING_NAME].type
    return LoadedWeights(layers, matrices, embedding, embedding_type, output_norm, panel_form)


def _common_panel_form(kernels: Iterable[LinearKernels]) -> PanelForm | None:
    forms = {used.panel_form if used.panel else None for used in kernels}
    return forms.pop() if len(forms) == 1 else None


class _Loader:
    """Places tensors one after another and packs them in the pool's threads."""

    def __init__(self, file: GGUFFile, arena: Arena, level: Level, pool: ThreadPoolExecutor) -> None:
        self.file, self.arena, self.level, self.pool = file, arena, level, pool
        self.pending: list[Future[None]] = []
        self.kernels: dict[GGMLType, LinearKernels] = {}

    def vector(self, name: str) -> int:
        """Address of a one-dimensional tensor as f32."""
        values = dequantize(self.file.data(name), self.file.tensors[name].type).ravel()
        place = self.arena.take(values.nbytes)
        place.view(np.float32)[:] = values
        return int(place.ctypes.data)

    def place(self, part: Part) -> int:
        """Address at which a matrix is being packed."""
        tensor = self.file.tensors[part.name]
        place = self.arena.take(packed_bytes(tensor.type, part.n_rows, tensor.shape[1]))
        raw = self.file.data(part.name)[part.first : part.first + part.n_rows]
        self.pending.append(self.pool.submit(pack, tensor.type, raw, place, level=self.level))
        return int(place.ctypes.data)

    def matrix(self, part: Part, row: Int64Array) -> None:
        """Fills a row of the table of matrices."""
        tensor = self.file.tensors[part.name]
        if tensor.type not in self.kernels:
            self.kernels[tensor.type] = linear_kernels(tensor.type, self.level)
        kernels = self.kernels[tensor.type]
        row[t.M_ADDRESS] = self.place(part)
        row[t.M_GROUPS] = -(-part.n_rows // 16)
        row[t.M_K] = tensor.shape[1]
        row[t.M_ROWS_KERNEL] = kernels.rows
        row[t.M_PANEL_KERNEL] = kernels.panel or 0
        row[t.M_TAKES_Q8] = kernels.rows_form == "q8"

    def finish(self) -> None:
        """Waits for the packing; raises what it raised."""
        for future in self.pending:
            future.result()
