"""Cosines and sines of every position, filled as far as positions have come."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from llamatrio.model.rope import rope_frequencies
from llamatrio.model.spec import RopeSpec

_STEP = 1024
"""Positions that are filled at a time: about a millisecond."""


class RopeTable:
    """Rows of cos [n_dims / 2], then sin [n_dims / 2], one for each position; owned by the compute thread."""

    def __init__(
        self, rope: RopeSpec, factors: NDArray[np.float32] | None, rows: NDArray[np.float32], *, windowed: bool
    ) -> None:
        self._frequencies = rope_frequencies(rope, factors, windowed=windowed)
        self._factor = rope.attn_factor
        self._rows = rows
        self._n_filled = 0

    @property
    def address(self) -> int:
        """Of position 0."""
        return int(self._rows.ctypes.data)

    def reach(self, position: int) -> None:
        """Fills the table up to `position`, at least."""
        while self._n_filled <= position:
            first, last = self._n_filled, min(self._n_filled + _STEP, len(self._rows))
            angles = np.arange(first, last, dtype=np.float64)[:, None] * self._frequencies
            half = self._rows.shape[1] // 2
            self._rows[first:last, :half] = np.cos(angles) * self._factor
            self._rows[first:last, half:] = np.sin(angles) * self._factor
            self._n_filled = last
