"""The devices that the contract of backends is tested on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from cpu_streams import golden_model

from llamatrio.backends.base import Backend
from tests import emuamx

Open = Callable[..., AbstractContextManager[Backend]]
"""open(model, n_cells=..., ...): a golden model by its name, or a file, on the device."""

DEVICES = ["cpu", *emuamx.emulated(), "emulated", pytest.param("gpu", marks=pytest.mark.gpu)]


def opener(request: pytest.FixtureRequest) -> Open:
    """Opens models on the device that `request.param` names; the emulated driver comes with its fixture."""
    if request.param == "cpu":
        return _open_cpu
    if request.param in emuamx.emulated():
        return _open_at(request.param)
    if request.param == "emulated":
        request.getfixturevalue("emucuda")
    return _open_cuda


def _path(model: str | Path) -> Path:
    return golden_model(model) if isinstance(model, str) else model


def _open_cpu(model: str | Path, **options: Any) -> AbstractContextManager[Backend]:
    from llamatrio.backends.cpu.backend import open_cpu_backend

    return open_cpu_backend(_path(model), n_threads=2, **options)


def _open_at(level: str) -> Open:
    @contextmanager
    def opened(model: str | Path, **options: Any) -> Iterator[Backend]:
        with emuamx.forced(level), _open_cpu(model, **options) as backend:
            yield backend

    return opened


def _open_cuda(model: str | Path, **options: Any) -> AbstractContextManager[Backend]:
    from llamatrio.backends.cuda.backend import open_cuda_backend

    return open_cuda_backend(_path(model), **options)
