"""Choosing and opening the device."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from llamatrio.backends.base import Backend
from llamatrio.config import EngineConfig
from llamatrio.errors import BackendUnavailableError
from llamatrio.model.model import Model

_log = logging.getLogger("llamatrio.engine")


@contextmanager
def open_backend(model: Model, config: EngineConfig) -> Iterator[Backend]:
    """Loads the model onto the device that the configuration names; blocks until the weights are there.

    Raises:
        BackendUnavailableError: the device is not there, or this version cannot use it.
        BackendError: too little memory; the message says what would fit.
        ModelError: the file asks for something the device's kernels do not have.
    """
    if config.device == "cuda":
        raise BackendUnavailableError("this version runs on the CPU only: --device cuda is not available yet")
    from llamatrio.backends.cpu.backend import open_cpu_backend  # loads the compiler: not for `import llamatrio`

    with open_cpu_backend(
        model.file,
        model.spec,
        n_cells=config.n_ctx or model.spec.n_ctx_train,
        n_lanes=config.n_parallel,
        type_k=config.type_k,
        type_v=config.type_v,
        n_threads=config.n_threads,
        max_rows=min(config.n_batch, config.n_ubatch + config.n_parallel),
    ) as backend:
        _log.info("device: %s", backend.device)
        yield backend
