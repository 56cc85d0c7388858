"""Fixtures of the backends' tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from cuda_rig import Rig


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the session's kernels are compiled to."""
    return tmp_path_factory.mktemp("kernels")


@contextmanager
def _rig(kernel_cache: Path, arch: str | None = None) -> Iterator[Rig]:
    from cuda.core import Device
    from cuda_rig import Rig

    from llamatrio.backends.cuda.compiler import KernelLoader

    device = Device()
    device.set_current()
    rig = Rig(device, KernelLoader(arch or f"sm_{device.arch}", kernel_cache))
    yield rig
    rig.free()


@pytest.fixture
def cuda_rig(emucuda_checked: Any, kernel_cache: Path) -> Iterator[Rig]:
    """Runs single kernels on the emulated driver, every access checked: bounds, races, bytes that nobody wrote."""
    with _rig(kernel_cache) as rig:
        yield rig


@pytest.fixture
def fast_rig(emucuda: Any, kernel_cache: Path) -> Iterator[Rig]:
    """The same without checks, where a test runs many kernels that are checked elsewhere."""
    with _rig(kernel_cache) as rig:
        yield rig


@pytest.fixture
def turing_rig(emucuda_checked: Any, kernel_cache: Path) -> Iterator[Rig]:
    """Kernels as compiled for sm_75, which has neither cp.async nor the large mma: the driver runs any PTX."""
    with _rig(kernel_cache, "sm_75") as rig:
        yield rig
