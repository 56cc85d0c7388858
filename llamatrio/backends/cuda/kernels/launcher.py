"""Where a kernel is enqueued: a stream and the compiled kernels."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from cuda.core import LaunchConfig, Stream, launch

from llamatrio.backends.cuda.compiler import KernelLoader

DevicePointer: TypeAlias = int
"""An address on the device; 0 is "none" where a kernel allows it."""

WARP = 32
VECTOR = 16
"""Bytes of one vectorised access."""

i32 = np.int32
i64 = np.int64
f32 = np.float32


class Launcher:
    """Enqueues kernels on one stream (or graph builder). Pointers go in as int, other arguments as NumPy scalars."""

    def __init__(self, loader: KernelLoader, stream: Stream) -> None:
        self.loader = loader
        self.stream = stream

    def __call__(self, name: str, grid: tuple[int, ...], block: int, *args: int | np.generic, **defines: int) -> None:
        """Enqueues `name` with `defines`; a grid with a zero in it is no launch at all."""
        if 0 in grid:
            return
        kernel = self.loader.kernel(name, **defines)
        stream: Any = self.stream
        launch(stream, LaunchConfig(grid=grid, block=block), kernel, *args)


def require_multiple(name: str, value: int, of: int) -> None:
    """Raises ValueError unless `value` is a positive multiple of `of`."""
    if value <= 0 or value % of:
        raise ValueError(f"expected {name} to be a positive multiple of {of}, not {value}")


def whole_warps(n: int, limit: int) -> int:
    """Threads of a block that has `n` items of work: whole warps, at most `limit`."""
    return min(limit, max(WARP, -(-n // WARP) * WARP))
