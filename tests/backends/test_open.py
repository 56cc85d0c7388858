"""Which device a model is opened on, and what the log says of it."""

from __future__ import annotations

import ctypes
import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from cpu_streams import golden_logits, golden_model, mean_kl

from llamatrio.backends.open import open_backend
from llamatrio.config import EngineConfig
from llamatrio.errors import BackendError, BackendUnavailableError, UnsupportedModelError
from llamatrio.evaluate import logits
from llamatrio.model.model import Model, open_model

PATH = golden_model("tiny-llama-f16")


@pytest.fixture
def model() -> Iterator[Model]:
    with open_model(PATH) as opened:
        yield opened


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    load = ctypes.CDLL

    def refuse(name: Any, *args: Any, **options: Any) -> Any:
        if "cuda" in str(name):
            raise OSError(f"{name}: cannot open shared object file")
        return load(name, *args, **options)

    monkeypatch.setattr(ctypes, "CDLL", refuse)


def device_of(model: Model, **options: Any) -> str:
    with open_backend(model, EngineConfig(n_ctx=64, n_parallel=1, n_threads=1, **options)) as backend:
        return backend.device


def test_auto_without_a_driver_is_the_cpu_and_one_line(
    model: Model, no_driver: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "llamatrio.engine"):
        device = device_of(model)
    assert device.startswith("CPU")
    assert caplog.messages == ["running on the CPU: there is no CUDA driver (libcuda.so.1)", f"device: {device}"]


def test_a_driver_without_cuda_python_is_the_cpu_and_a_reason(
    emucuda: Any, model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "llamatrio.backends.cuda.device", None)
    with caplog.at_level(logging.INFO, "llamatrio.engine"):
        assert device_of(model).startswith("CPU")
    assert "cuda-python is not installed" in caplog.messages[0]


def test_cuda_without_a_driver_is_an_error(model: Model, no_driver: None) -> None:
    with pytest.raises(BackendUnavailableError, match="there is no CUDA driver"):
        device_of(model, device="cuda")


def test_auto_with_a_device_is_cuda_and_says_which(
    emucuda: Any, model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "llamatrio.engine"):
        assert device_of(model).startswith("CUDA, Emulated GPU")
    assert caplog.messages[-1] == "device: CUDA, Emulated GPU, 8192 MiB"
    assert device_of(model, device="cuda").startswith("CUDA")


def test_evaluation_on_the_gpu_agrees_with_the_cpu(emucuda: Any) -> None:
    """All rows of logits of a text: more than the pinned results hold at once."""
    ids = golden_logits("tiny-llama-f16")["tokens"]
    cpu, cuda = (logits(PATH, ids.tolist(), backend=name, n_ubatch=64) for name in ("cpu", "cuda"))
    assert cuda.shape == cpu.shape
    assert mean_kl(cpu, cuda) < 1e-3


def test_the_cpu_can_be_forced(emucuda: Any, model: Model) -> None:
    assert device_of(model, device="cpu").startswith("CPU")
    assert device_of(model, n_gpu_layers=0).startswith("CPU")
    with pytest.raises(BackendError, match="n_gpu_layers is 0"):
        device_of(model, device="cuda", n_gpu_layers=0)


def test_experts_run_on_cuda_and_are_refused_by_the_cpu(emucuda: Any) -> None:
    with open_model(golden_model("more/tiny-gpt-oss-mxfp4")) as model:
        assert device_of(model).startswith("CUDA")
        with pytest.raises(UnsupportedModelError, match="gpt-oss needs; the CUDA backend runs it"):
            device_of(model, device="cpu")


class NoDevices:
    @staticmethod
    def get_all_devices() -> tuple[()]:
        return ()


class OldDevice:
    name = "an old one"
    compute_capability = (6, 1)

    @classmethod
    def get_all_devices(cls) -> tuple[type[OldDevice]]:
        return (cls,)


@pytest.mark.parametrize(
    ("devices", "reason"), [(NoDevices, "finds no device"), (OldDevice, "an old one has compute capability 6.1")]
)
def test_a_driver_without_a_usable_device(
    emucuda: Any,
    model: Model,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    devices: Any,
    reason: str,
) -> None:
    monkeypatch.setattr("llamatrio.backends.cuda.device.Device", devices)
    with caplog.at_level(logging.INFO, "llamatrio.engine"):
        assert device_of(model).startswith("CPU")
    assert reason in caplog.messages[0]


_CHILD = """
import sys
from llamatrio.backends.open import open_backend
from llamatrio.config import EngineConfig
from llamatrio.model.model import open_model
with open_model(sys.argv[1]) as model:
    with open_backend(model, EngineConfig(n_ctx=64, n_threads=1, device="cpu")):
        print([name for name in sys.modules if name == "cuda" or name.startswith("cuda.")])
"""


def test_the_cpu_imports_nothing_of_cuda() -> None:
    command = [sys.executable, "-c", _CHILD, str(PATH)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"
