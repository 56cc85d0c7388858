"""What the CUDA backend refuses, each in one line: misuse, models without kernels, drivers that fail."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.core")

from cpu_streams import Piece, Stream, golden_model, make_batch

from llamatrio.backends.base import StagingBuffer
from llamatrio.backends.cuda import compiler, device
from llamatrio.backends.cuda.backend import open_cuda_backend
from llamatrio.backends.cuda.completion import complete, running_future
from llamatrio.backends.cuda.kernels import experts, matmul
from llamatrio.backends.cuda.kernels.launcher import Launcher
from llamatrio.backends.cuda.kernels.rows import RowKind, Rows
from llamatrio.backends.cuda.kernels.weights import Matrix, WeightType
from llamatrio.backends.cuda.plan import check_batch
from llamatrio.backends.cuda.shape import Limits, check_spec
from llamatrio.errors import BackendError, BackendUnavailableError, UnsupportedModelError
from llamatrio.model.arch import spec_from_gguf
from llamatrio.model.ggml_type import GGMLType
from llamatrio.model.gguf import open_gguf
from llamatrio.model.quants import can_dequantize
from tests.emucuda.control import Control
from tests.helpers_gguf import RawTensor, write_gguf

MODEL = golden_model("tiny-qwen3-f16")
EXPERTS = golden_model("more/tiny-qwen3moe-f16")


def no_launch(*args: Any, **defines: Any) -> None:
    pytest.fail("a kernel was launched")


NO_LAUNCH: Any = no_launch

# ---- misuse


@pytest.mark.parametrize("options", [{"n_cells": 0}, {"n_lanes": 0}, {"n_ctx": -1}, {"max_rows": 0}])
def test_counts_that_are_out_of_range(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        open_cuda_backend(MODEL, **{"n_cells": 32, **options}).__enter__()


def test_staging_buffers_of_others(emucuda: Control) -> None:
    with open_cuda_backend(MODEL, n_cells=32) as backend:
        foreign = StagingBuffer(np.zeros((4, backend.layout.record_bytes), np.uint8))
        with pytest.raises(ValueError, match="that this backend made"):
            backend.gather_cells(np.arange(2, dtype=np.int32), foreign)
        with pytest.raises(ValueError, match="at least 1 record"):
            backend.new_staging(0)


def test_batches_with_lists_of_unequal_length_or_too_many_lanes() -> None:
    limits = Limits(n_cells=64, n_lanes=2, max_rows=32)
    batch = make_batch([Piece(Stream(lane, np.arange(8)), [1], is_decode=True) for lane in range(3)])
    with pytest.raises(ValueError, match="at most 2 lanes"):
        check_batch(batch, 288, limits)
    batch.cells = batch.cells[:2]
    with pytest.raises(ValueError, match="expected 3 positions, lanes and cells"):
        check_batch(batch, 288, limits)


def test_arguments_of_kernels() -> None:
    with pytest.raises(ValueError, match="9 of 8"):
        experts.moe_route(NO_LAUNCH, 0, 0, 0, 0, n_rows=1, n_expert=8, n_used=9)
    with pytest.raises(ValueError, match=r"plan_tiles\(\) tiles, not 1"):
        experts.moe_plan(NO_LAUNCH, 0, experts.ExpertPlan(0, 0, 1, 16), n_pairs=64, n_expert=8)
    with pytest.raises(ValueError, match="as F16, not Q8"):
        matmul.matmul_tile(NO_LAUNCH, Matrix(WeightType.F16, 0, 64, 64), Rows(RowKind.Q8, 0, 0), 0, 0, n_rows=1)


def test_a_grid_of_nothing_is_no_launch() -> None:
    Launcher(NO_LAUNCH, NO_LAUNCH)("rms_norm", (0,), 32)


def test_what_a_result_raises_reaches_whoever_waits() -> None:
    future: Future[int] = running_future()
    complete(future, lambda: 1 // 0, None)
    assert isinstance(future.exception(), ZeroDivisionError)


# ---- models


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"head_dim": 80}, "multiple of 32 up to 256, not 80"),
        ({"head_dim": 288}, "not 288"),
        ({"n_embd": 100}, "n_embd to be a multiple of 32, not 100"),
        ({"n_ff": 100}, "n_ff to be a multiple of 32, not 100"),
        ({"n_expert": 300}, "experts, not 300"),
        ({"n_head": 128, "n_head_kv": 1}, "heads to a KV head"),
        ({"n_vocab": 1 << 30}, "vocabulary of at most"),
    ],
)
def test_sizes_that_the_kernels_do_not_have(change: dict[str, int], what: str) -> None:
    with open_gguf(MODEL) as file:
        spec = spec_from_gguf(file)
    check_spec(spec)
    with pytest.raises(UnsupportedModelError, match=what):
        check_spec(replace(spec, **change))  # type: ignore[arg-type]


def test_every_type_that_can_be_read_has_kernels() -> None:
    assert {int(kind) for kind in GGMLType if can_dequantize(kind)} == {int(kind) for kind in WeightType}


def test_a_quantized_router(emucuda: Control, tmp_path: Path) -> None:
    """The choice of experts is made in full precision; nobody's files have it otherwise."""
    with open_gguf(EXPERTS) as file:
        tensors = {n: RawTensor(int(t.type), t.shape, file.data(n).tobytes()) for n, t in file.tensors.items()}
        tensors["blk.0.ffn_gate_inp.weight"] = RawTensor(int(GGMLType.Q8_0), (8, 128), bytes(8 * 4 * 34))
        path = write_gguf(tmp_path / "router.gguf", dict(file.metadata), tensors)
    with pytest.raises(UnsupportedModelError, match=r"blk.0.ffn_gate_inp.weight is quantized"):
        open_cuda_backend(path, n_cells=32).__enter__()


# ---- drivers and compilers that do not answer


def test_a_driver_that_does_not_tell_its_memory(emucuda: Control) -> None:
    emucuda.fail_call("cuMemGetInfo", 1)
    with pytest.raises(BackendError, match="does not tell its memory: CUDA_ERROR"):
        open_cuda_backend(MODEL, n_cells=32).__enter__()


def test_a_kernel_that_cannot_be_loaded(emucuda: Control) -> None:
    emucuda.fail_call("cuKernelGetFunction", 1)
    with pytest.raises(BackendError, match="cannot be loaded: CUDA_ERROR"):
        open_cuda_backend(MODEL, n_cells=32).__enter__()


def raising(error: Exception) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail


def test_a_driver_without_its_kernel_module(emucuda: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    error = device.CUDAError("CUDA_ERROR_NO_DEVICE: no CUDA-capable device\nis detected")
    monkeypatch.setattr(device.Device, "get_all_devices", raising(error))
    with pytest.raises(BackendUnavailableError, match=r"^the CUDA driver has no device for us: CUDA_ERROR_NO_DEVICE$"):
        device.find_device()


def test_no_nvrtc(emucuda: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "nvrtc_version", raising(RuntimeError("libnvrtc.so not found")))
    with pytest.raises(BackendUnavailableError, match=r"^NVRTC is missing: install llamatrio\[cuda\]$"):
        device.find_device()


def test_an_nvrtc_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = compiler.nvrtc.nvrtcResult.NVRTC_ERROR_INTERNAL_ERROR
    with monkeypatch.context() as patched:
        patched.setattr(compiler.nvrtc, "nvrtcVersion", lambda: (failed, 0, 0))
        with pytest.raises(BackendError, match="does not answer: NVRTC_ERROR_INTERNAL_ERROR"):
            compiler.nvrtc_version.__wrapped__()
    program: Any = SimpleNamespace(handle=0)
    monkeypatch.setattr(compiler.nvrtc, "nvrtcGetPTXSize", lambda handle: (failed, 0))
    with pytest.raises(BackendError, match="gives no PTX: NVRTC_ERROR_INTERNAL_ERROR"):
        compiler._ptx_of(program)
