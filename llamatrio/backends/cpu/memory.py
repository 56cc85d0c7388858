"""How much memory there is, and a refusal that says what would fit."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from llamatrio.errors import BackendError

MIB = 1 << 20


def available_bytes() -> int | None:
    """Bytes this process can take without swapping, or None where the system does not say.

    Linux: MemAvailable of /proc/meminfo, and the control group's limit where it is tighter.
    """
    found = [_meminfo_available(), _cgroup_available()]
    known = [n for n in found if n is not None]
    if known:
        return min(known)
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _meminfo_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_available() -> int | None:
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        used = int((folder / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - used)


class MemoryPlan(NamedTuple):
    """Bytes that a backend takes, by what for."""

    weights: int
    scratch: int
    cells: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


def check_memory(plan_for: Callable[[int], MemoryPlan], n_cells: int, available: int | None) -> MemoryPlan:
    """The plan for `n_cells` KV cells.

    Raises:
        BackendError: it exceeds `available` bytes; the message names the number of cells that would fit.
    """
    plan = plan_for(n_cells)
    if available is None or plan.total <= available:
        return plan
    need = (
        f"the model needs {plan.weights // MIB} MiB for weights, {plan.scratch // MIB} MiB of scratch and "
        f"{plan.cells // MIB} MiB for {n_cells} KV cells, but {available // MIB} MiB are available"
    )
    n_fit = bisect_right(range(n_cells), available, key=lambda n: plan_for(n).total) - 1
    raise BackendError(f"{need}; {n_fit} cells would fit" if n_fit > 0 else f"{need}; no number of cells fits")
