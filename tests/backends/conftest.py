"""Fixtures of the backends' tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from cuda_rig import Rig


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the session's kernels are compiled to."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def cuda_rig(emucuda: Any, kernel_cache: Path) -> Iterator[Rig]:
    """Runs single kernels on the emulated driver, every access checked: bounds, races, bytes that nobody wrote."""
    from cuda.core import Device
    from cuda_rig import Rig

    from llamatrio.backends.cuda.compiler import KernelLoader

    device = Device()
    device.set_current()
    with emucuda.checked():
        rig = Rig(device, KernelLoader(f"sm_{device.arch}", kernel_cache))
        yield rig
        rig.free()
