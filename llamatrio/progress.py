"""Progress of what takes seconds: a bar where stderr is a terminal, lines of the log where it is not."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Told (bytes so far, bytes in all); all is 0 while nobody knows."""
Clock = Callable[[], float]
"""Seconds."""

_WIDTH = 40
_SECONDS_BEFORE_BAR = 0.5
_SECONDS_BETWEEN_BARS = 0.1
_SECONDS_BETWEEN_LINES = 2.0


def shown_progress(what: str, log: logging.Logger, clock: Clock = time.monotonic) -> Progress:
    """How to tell the user about `what`: "loading weights", or the name of a file that comes."""
    return _bar(what, clock) if sys.stderr.isatty() else _lines(what, log, clock)


def _bar(what: str, clock: Clock) -> Progress:
    """Redraws itself; what is done in a moment shows nothing."""
    due, is_drawn = clock() + _SECONDS_BEFORE_BAR, False

    def note(n_done: int, n_total: int) -> None:
        nonlocal due, is_drawn
        is_done = n_done >= n_total
        if not n_total or (clock() < due and not (is_done and is_drawn)):
            return
        due, is_drawn = clock() + _SECONDS_BETWEEN_BARS, True
        filled = min(_WIDTH, _WIDTH * n_done // n_total)
        bar = f"{'#' * filled}{' ' * (_WIDTH - filled)}"
        text = f"\r{what} [{bar}] {n_done / 1e6:.0f} of {n_total / 1e6:.0f} MB"
        print(text, end="\n" if is_done else "", file=sys.stderr, flush=True)

    return note


def _lines(what: str, log: logging.Logger, clock: Clock) -> Progress:
    due = clock() + _SECONDS_BETWEEN_LINES

    def note(n_done: int, n_total: int) -> None:
        nonlocal due
        if n_total and clock() >= due:
            due = clock() + _SECONDS_BETWEEN_LINES
            log.info("%s: %d %% of %.0f MB", what, 100 * n_done // n_total, n_total / 1e6)

    return note
