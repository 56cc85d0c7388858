"""A model's weights on the device: uploaded once through pinned memory, quantized ones rearranged into planes there.

The file is only mapped: its bytes go through two pinned halves, one being filled while the other is under way. A
quantized tensor lands as it is in a load area (memory that becomes KV cells and scratch afterwards), from where
planar_rows spreads it to its place; everything on one stream, so the next tensor finds the area free.
"""

from __future__ import annotations

import logging
import math
from concurrent.futures import Future
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamatrio.backends.cuda.completion import Completions
from llamatrio.backends.cuda.device import Gpu
from llamatrio.backends.cuda.kernels import weights as kernels
from llamatrio.backends.cuda.kernels.launcher import DevicePointer, Launcher
from llamatrio.backends.cuda.kernels.rows import rope_turns
from llamatrio.backends.cuda.kernels.weights import Matrix, WeightType, planes_bytes
from llamatrio.backends.cuda.memory import MIB, DeviceArena, PinnedMemory, aligned
from llamatrio.errors import UnsupportedModelError
from llamatrio.model.gguf import GGUFFile, TensorInfo
from llamatrio.model.quants import dequantize
from llamatrio.model.rope import factors_name, rope_frequencies
from llamatrio.model.spec import ModelSpec
from llamatrio.progress import Progress, shown_progress

_log = logging.getLogger("llamatrio.model")

HALF_BYTES = 8 * MIB
"""One of the two halves of the pinned upload buffer."""


class Linear(NamedTuple):
    """A product: a matrix, or one for each expert, and its bias (0: none)."""

    matrix: Matrix
    bias: DevicePointer


class Dense(NamedTuple):
    """A feed-forward block."""

    gate_up: tuple[Linear, ...]
    """Gate and up, or one product of both; side by side."""
    down: Linear


class Experts(NamedTuple):
    """A mixture of feed-forward blocks."""

    router: Linear
    gate: Linear
    up: Linear
    down: Linear


class LayerWeights(NamedTuple):
    """One layer. Vectors are f32; 0 where the model has none."""

    attn_norm: DevicePointer
    qkv: tuple[Linear, ...]
    """Q, K and V, or one product of all; side by side."""
    q_norm: DevicePointer
    k_norm: DevicePointer
    sinks: DevicePointer
    o: Linear
    post_attn_norm: DevicePointer
    ffn_norm: DevicePointer
    feed_forward: Dense | Experts
    post_ffn_norm: DevicePointer
    turns: DevicePointer
    """The rope kernel's table (kernels.rows.rope_turns)."""


class ModelWeights(NamedTuple):
    """All of a model."""

    embedding: Matrix
    layers: tuple[LayerWeights, ...]
    output_norm: DevicePointer
    head: Matrix


class WeightSizes(NamedTuple):
    """Bytes on the device."""

    stored: int
    """What the weights take in an arena."""
    load_area: int
    """The largest quantized tensor, as in the file."""


def weight_sizes(file: GGUFFile, spec: ModelSpec) -> WeightSizes:
    """What loading the file takes."""
    stored, load_area = 2 * aligned(4 * spec.rope.n_dims), 0
    for name, tensor in file.tensors.items():
        if not _is_matrix(name, tensor):
            stored += aligned(4 * math.prod(tensor.shape))
            continue
        type, (n_expert, n_rows, k) = _weight_type(tensor), _matrix_shape(tensor)
        stored += aligned(planes_bytes(type, n_expert * n_rows, k))
        if not type.is_float:
            load_area = max(load_area, aligned(file.data(name).nbytes))
    return WeightSizes(stored, load_area)


def _is_matrix(name: str, tensor: TensorInfo) -> bool:
    """Experts' biases have two dimensions, too."""
    return len(tensor.shape) > 1 and not name.endswith(".bias")


def _matrix_shape(tensor: TensorInfo) -> tuple[int, int, int]:
    """Experts, outputs and inputs."""
    n_expert = tensor.shape[0] if len(tensor.shape) == 3 else 1
    return n_expert, tensor.shape[-2], tensor.shape[-1]


def _weight_type(tensor: TensorInfo) -> WeightType:
    """There are kernels for every type that the model package reads."""
    return WeightType(int(tensor.type))


class Uploader:
    """Bytes to the device through the two halves of a pinned buffer; waits only for a half to be free again."""

    def __init__(self, gpu: Gpu, pinned: PinnedMemory, arena: DeviceArena, done: Completions, owner: ExitStack) -> None:
        """owner keeps the two events."""
        self._gpu, self._pinned, self._arena, self._done = gpu, pinned, arena, done
        self._half_bytes = len(pinned.bytes) // 2
        self._events = (gpu.new_event(owner), gpu.new_event(owner))
        self._pending: list[Future[None] | None] = [None, None]
        self._half = 0

    def upload(self, data: NDArray[np.uint8], to: DevicePointer) -> None:
        """Enqueues copying bytes [n] to a device address. Raises BackendError."""
        for first in range(0, len(data), self._half_bytes):
            part = data[first : first + self._half_bytes]
            half, start = self._half, self._half * self._half_bytes
            self._wait_for(half)
            self._pinned.bytes[start : start + len(part)] = part
            self._pinned.upload(start, len(part), self._arena, to + first, self._gpu.compute)
            self._gpu.compute.record(self._events[half])
            self._pending[half] = self._done.future(self._events[half], lambda: None)
            self._half = 1 - half

    def finish(self) -> None:
        """Waits until everything is there. Raises BackendError."""
        for half in (0, 1):
            self._wait_for(half)

    def _wait_for(self, half: int) -> None:
        pending = self._pending[half]
        if pending is not None:
            pending.result()


class WeightLoader:
    """Places tensors one after another in an arena."""

    def __init__(
        self,
        file: GGUFFile,
        spec: ModelSpec,
        arena: DeviceArena,
        load_area: DevicePointer,
        uploader: Uploader,
        run: Launcher,
        n_ctx: int,
        on_progress: Progress | None = None,
    ) -> None:
        self._file, self._spec, self._arena, self._load_area, self._n_ctx = file, spec, arena, load_area, n_ctx
        self._uploader, self._run, self._on_progress = (
            uploader,
            run,
            on_progress or shown_progress("loading weights", _log),
        )
        self._n_done, self._n_bytes = 0, sum(file.data(name).nbytes for name in file.tensors)

    def load(self) -> ModelWeights:
        """All tensors of the model; waits until they are there. Raises UnsupportedModelError, BackendError."""
        spec = self._spec
        turns = [self._turns(windowed=False), self._turns(windowed=True)]
        embedding = self._matrix("token_embd.weight")
        layers = tuple(self._layer(f"blk.{i}.", turns[spec.is_windowed(i)]) for i in range(spec.n_layer))
        output_norm = self._vector("output_norm.weight")
        head = embedding if spec.tied_head else self._matrix("output.weight")
        self._uploader.finish()
        self._on_progress(self._n_bytes, self._n_bytes)
        return ModelWeights(embedding, layers, output_norm, head)

    def _layer(self, prefix: str, turns: DevicePointer) -> LayerWeights:
        optional, linear = self._optional_vector, self._linear
        fused_qkv = self._has(prefix + "attn_qkv.weight")
        # gpt-oss names its norm before the feed-forward block after the attention that it follows.
        has_ffn_norm = self._has(prefix + "ffn_norm.weight")
        return LayerWeights(
            attn_norm=self._vector(prefix + "attn_norm.weight"),
            qkv=tuple(
                linear(prefix + name) for name in (["attn_qkv"] if fused_qkv else ["attn_q", "attn_k", "attn_v"])
            ),
            q_norm=optional(prefix + "attn_q_norm.weight"),
            k_norm=optional(prefix + "attn_k_norm.weight"),
            sinks=optional(prefix + "attn_sinks.weight"),
            o=linear(prefix + "attn_output"),
            post_attn_norm=optional(prefix + "post_attention_norm.weight") if has_ffn_norm else 0,
            ffn_norm=self._vector(prefix + ("ffn_norm.weight" if has_ffn_norm else "post_attention_norm.weight")),
            feed_forward=self._experts(prefix) if self._has(prefix + "ffn_gate_inp.weight") else self._dense(prefix),
            post_ffn_norm=optional(prefix + "post_ffw_norm.weight"),
            turns=turns,
        )

    def _dense(self, prefix: str) -> Dense:
        names = ["ffn_gate", "ffn_up"] if self._has(prefix + "ffn_gate.weight") else ["ffn_up"]
        return Dense(tuple(self._linear(prefix + name) for name in names), self._linear(prefix + "ffn_down"))

    def _experts(self, prefix: str) -> Experts:
        router = self._linear(prefix + "ffn_gate_inp")
        if not router.matrix.type.is_float:
            raise UnsupportedModelError(f"{self._file.path}: tensor {prefix}ffn_gate_inp.weight is quantized")
        return Experts(router, *(self._linear(f"{prefix}ffn_{name}_exps") for name in ("gate", "up", "down")))

    def _linear(self, name: str) -> Linear:
        return Linear(self._matrix(name + ".weight"), self._optional_vector(name + ".bias"))

    def _has(self, name: str) -> bool:
        return name in self._file.tensors

    def _turns(self, *, windowed: bool) -> DevicePointer:
        rope = self._spec.rope
        name = factors_name(rope, self._n_ctx)
        factors = self._float32(name) if self._has(name) else None
        return self._place(rope_turns(rope_frequencies(rope, factors, windowed=windowed)))

    def _optional_vector(self, name: str) -> DevicePointer:
        return self._vector(name) if self._has(name) else 0

    def _vector(self, name: str) -> DevicePointer:
        address = self._place(self._float32(name))
        self._note(name)
        return address

    def _float32(self, name: str) -> NDArray[np.float32]:
        return dequantize(self._file.data(name), self._file.tensors[name].type).ravel()

    def _place(self, values: NDArray[np.float32]) -> DevicePointer:
        address = self._arena.take(values.nbytes)
        self._uploader.upload(np.ascontiguousarray(values).reshape(-1).view(np.uint8), address)
        return address

    def _matrix(self, name: str) -> Matrix:
        tensor = self._file.tensors[name]
        type, (n_expert, n_out, k) = _weight_type(tensor), _matrix_shape(tensor)
        n_rows = n_expert * n_out
        data = self._file.data(name).reshape(-1)
        planes = self._arena.take(planes_bytes(type, n_rows, k))
        if type.is_float:
            self._uploader.upload(data, planes)
        else:
            self._uploader.upload(data, self._load_area)
            kernels.planar_rows(self._run, self._load_area, planes, type=type, n_rows=n_rows, k=k)
        self._note(name)
        return Matrix(type, planes, n_out, k, n_expert)

    def _note(self, name: str) -> None:
        self._n_done += self._file.data(name).nbytes
        self._on_progress(self._n_done, self._n_bytes)
