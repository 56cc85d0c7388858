"""What a model takes on a device, and a refusal that says what would fit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import NamedTuple

from llamatrio.config import MIB
from llamatrio.errors import BackendError


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
