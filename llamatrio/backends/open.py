"""Choosing and opening the device."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from llamatrio.backends.base import Backend
from llamatrio.backends.cuda.driver import require_driver
from llamatrio.config import EngineConfig
from llamatrio.errors import BackendUnavailableError
from llamatrio.model.model import Model
from llamatrio.sched.types import least_rows

_log = logging.getLogger("llamatrio.engine")


@contextmanager
def open_backend(model: Model, config: EngineConfig) -> Iterator[Backend]:
    """Loads the model onto the device that the configuration names; blocks until the weights are there.

    "auto" takes CUDA where a driver and a device are found, unless no layers are to run there (n_gpu_layers 0).

    Raises:
        BackendUnavailableError: the device is not there, or this version cannot use it.
        BackendError: too little memory; the message says what would fit.
        ModelError: the file asks for something the device's kernels do not have.
    """
    opened = _open_cuda(model, config) if _chooses_cuda(config) else _open_cpu(model, config)
    with opened as backend:
        _log.info("device: %s", backend.device)
        yield backend


def _chooses_cuda(config: EngineConfig) -> bool:
    """Imports CUDA's packages only where its driver is there."""
    if config.device == "cpu" or (config.device == "auto" and config.n_gpu_layers == 0):
        return False
    try:
        require_driver()
        _require_device()
    except BackendUnavailableError as error:
        if config.device == "cuda":
            raise
        _log.info("running on the CPU: %s", error)
        return False
    return True


def _require_device() -> None:
    try:
        from llamatrio.backends.cuda.device import find_device
    except ImportError as error:
        raise BackendUnavailableError(f"cuda-python is not installed ({error.name})") from error
    find_device()


def _open_cuda(model: Model, config: EngineConfig) -> AbstractContextManager[Backend]:
    from llamatrio.backends.cuda.backend import open_cuda_backend

    n_cells = _n_cells(model, config)
    return open_cuda_backend(
        model.file,
        model.spec,
        n_cells=n_cells,
        n_lanes=config.n_parallel,
        n_ctx=config.n_ctx_seq(n_cells),
        type_k=config.type_k,
        type_v=config.type_v,
        max_rows=_max_rows(config),
        n_gpu_layers=config.n_gpu_layers,
    )


def _open_cpu(model: Model, config: EngineConfig) -> AbstractContextManager[Backend]:
    from llamatrio.backends.cpu.backend import open_cpu_backend  # loads the compiler: not for `import llamatrio`

    n_cells = _n_cells(model, config)
    return open_cpu_backend(
        model.file,
        model.spec,
        n_cells=n_cells,
        n_lanes=config.n_parallel,
        n_ctx=config.n_ctx_seq(n_cells),
        type_k=config.type_k,
        type_v=config.type_v,
        n_threads=config.n_threads,
        max_rows=_max_rows(config),
    )


def _n_cells(model: Model, config: EngineConfig) -> int:
    return config.n_ctx or model.spec.n_ctx_train


def _max_rows(config: EngineConfig) -> int:
    return max(min(config.n_batch, config.n_ubatch + config.n_parallel), least_rows(config.n_parallel))
