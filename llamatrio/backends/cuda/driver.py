"""Whether there is a CUDA driver at all: asked at every start, so without importing anything of CUDA."""

from __future__ import annotations

import ctypes
import sys

from llamatrio.errors import BackendUnavailableError


def require_driver() -> None:
    """Raises BackendUnavailableError where the driver's library cannot be loaded."""
    library = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
    try:
        ctypes.CDLL(library)
    except OSError:
        raise BackendUnavailableError(f"there is no CUDA driver ({library})") from None
