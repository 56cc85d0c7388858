"""Pace: how many prompt rows a step can take without holding up the streams that decode in it."""

from __future__ import annotations

_WEIGHT = 0.2
"""Of a new observation in the running means: a handful of steps to follow a change, no jump at one slow step."""


class Pace:
    """Running means of what steps cost, on the device at hand. Owned by the scheduler.

    target_s: seconds that a step which also decodes should take.
    """

    def __init__(self, target_s: float) -> None:
        if target_s <= 0:
            raise ValueError(f"expected a positive target, not {target_s}")
        self.target_s = target_s
        self._decode_s: float | None = None
        """Seconds of a step that only decodes."""
        self._row_s: float | None = None
        """Seconds that each prompt row adds."""

    def prompt_rows(self, *, n_decode: int, limit: int, piece: int) -> int:
        """Prompt rows for the next step, at most `limit`. Beside streams: whole pieces, and always at least one."""
        if n_decode == 0 or limit <= piece:
            return max(limit, 0)
        if self._row_s is None:
            return piece
        rows = int((self.target_s - (self._decode_s or 0.0)) / self._row_s)
        return max(piece, min(rows, limit) // piece * piece)

    def observe(self, *, n_decode: int, n_prompt: int, seconds: float) -> None:
        """Learns from a step that has run."""
        if n_prompt == 0:
            self._decode_s = _mean(self._decode_s, seconds)
        elif n_prompt >= 32:  # a few rows tell more about the fixed cost of a step than about rows
            rest = seconds - (self._decode_s or 0.0 if n_decode else 0.0)
            self._row_s = _mean(self._row_s, max(rest, 1e-6) / n_prompt)


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + _WEIGHT * (new - old)
