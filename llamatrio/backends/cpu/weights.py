"""A model's weights in the arena: packed for the kernels, in the order in which a step reads them.

A head that is most of what a step reads stays in whole rows, beside a sketch of it (screen.py).

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
from llamatrio.backends.cpu.linear import LinearKernels, embed_kernel, linear_kernels
from llamatrio.backends.cpu.pack import Packing, check_matrix, pack, packed_bytes
from llamatrio.backends.cpu.sketch import LONGEST_ROW, Q8_SKETCH
from llamatrio.backends.cpu.whole_rows import Q8_WHOLE
from llamatrio.errors import ModelError, UnsupportedModelError
from llamatrio.model.ggml_type import GGMLType
from llamatrio.model.gguf import GGUFFile, TensorInfo
from llamatrio.model.quants import dequantize
from llamatrio.model.spec import ModelSpec

Int64Array = NDArray[np.int64]

EMBEDDING_NAME, HEAD_NAME, OUTPUT_NORM_NAME = "token_embd.weight", "output.weight", "output_norm.weight"
LEAST_SHARE = 0.5
"""Of the bytes of all matrices: a head that has less gets no sketch, which takes memory."""
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
    embed_kernel: int
    output_norm: int
    sketch: int
    """Of the head; 0 where it has none."""
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
    total = sketch_bytes(file, spec)
    for name, tensor in file.tensors.items():
        if len(tensor.shape) == 1:
            total += padded(4 * tensor.shape[0])
            continue
        n_rows = parts.get(name.split(".", 2)[-1], [tensor.shape[0]])
        total += sum(padded(packed_bytes(tensor.type, n, tensor.shape[1])) for n in n_rows)
    return total


def sketch_bytes(file: GGUFFile, spec: ModelSpec) -> int:
    """Bytes of the head's sketch; 0 where it gets none."""
    if not has_sketch(file, spec):
        return 0
    head = file.tensors[head_name(spec)]
    return padded(packed_bytes(Q8_SKETCH, head.shape[0], head.shape[1]))


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


def head_name(spec: ModelSpec) -> str:
    """The tensor that makes logits."""
    return EMBEDDING_NAME if spec.tied_head else HEAD_NAME


def has_sketch(file: GGUFFile, spec: ModelSpec) -> bool:
    """Whether the likeliest tokens are found by a sketch of the head."""
    head = file.tensors[head_name(spec)]
    read = sum(tensor.nbytes for tensor in file.tensors.values() if len(tensor.shape) == 2)
    if not spec.tied_head:
        read -= file.tensors[EMBEDDING_NAME].nbytes
    k = head.shape[1]
    fits = head.type == GGMLType.Q8_0 and k <= LONGEST_ROW and k % Q8_WHOLE.n_weights == 0
    # A soft cap keeps the order, but not in the last bit.
    return fits and not spec.final_softcap and head.nbytes > LEAST_SHARE * read


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
        head, embedding = Part(head_name(spec), 0, spec.n_vocab), Part(EMBEDDING_NAME, 0, spec.n_vocab)
        is_sketched = has_sketch(file, spec)
        head_packing = Q8_WHOLE if is_sketched else file.tensors[head.name].type
        loader.matrix(head, matrices[-1], head_packing)
        sketch = loader.place(head, Q8_SKETCH) if is_sketched else 0
        embedding_packing = head_packing if spec.tied_head else file.tensors[embedding.name].type
        embedding_at = int(matrices[-1, t.M_ADDRESS]) if spec.tied_head else loader.place(embedding, embedding_packing)
        loader.finish()
    embed = embed_kernel(embedding_packing, level)
    return LoadedWeights(layers, matrices, embedding_at, embed, output_norm, sketch, panel_form)


def _common_panel_form(kernels: Iterable[LinearKernels]) -> PanelForm | None:
    forms = {used.panel_form if used.panel else None for used in kernels}
    return forms.pop() if len(forms) == 1 else None


class _Loader:
    """Places tensors one after another and packs them in the pool's threads."""

    def __init__(self, file: GGUFFile, arena: Arena, level: Level, pool: ThreadPoolExecutor) -> None:
        self.file, self.arena, self.level, self.pool = file, arena, level, pool
        self.pending: list[Future[None]] = []
        self.kernels: dict[Packing, LinearKernels] = {}

    def vector(self, name: str) -> int:
        """Address of a one-dimensional tensor as f32."""
        values = dequantize(self.file.data(name), self.file.tensors[name].type).ravel()
        place = self.arena.take(values.nbytes)
        place.view(np.float32)[:] = values
        return int(place.ctypes.data)

    def place(self, part: Part, packing: Packing) -> int:
        """Address at which a matrix is being packed."""
        place = self.arena.take(packed_bytes(packing, part.n_rows, self.file.tensors[part.name].shape[1]))
        raw = self.file.data(part.name)[part.first : part.first + part.n_rows]
        self.pending.append(self.pool.submit(pack, packing, raw, place, level=self.level))
        return int(place.ctypes.data)

    def matrix(self, part: Part, row: Int64Array, packing: Packing | None = None) -> None:
        """Fills a row of the table of matrices. Packed as its type is, unless told otherwise."""
        tensor = self.file.tensors[part.name]
        packing = tensor.type if packing is None else packing
        if packing not in self.kernels:
            self.kernels[packing] = linear_kernels(packing, self.level)
        kernels = self.kernels[packing]
        row[t.M_ADDRESS] = self.place(part, packing)
        row[t.M_GROUPS] = -(-part.n_rows // 16)
        row[t.M_K] = tensor.shape[1]
        row[t.M_ROWS_KERNEL] = kernels.rows
        row[t.M_PANEL_KERNEL] = kernels.panel or 0
        row[t.M_TAKES_Q8] = kernels.rows_form == "q8"

    def finish(self) -> None:
        """Waits for the packing; raises what it raised."""
        for future in self.pending:
            future.result()
