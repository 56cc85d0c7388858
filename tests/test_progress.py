"""What is told of work that takes seconds, on a terminal and in a log."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from llamatrio.progress import shown_progress

LOG = logging.getLogger("llamatrio.test")
MB = 1_000_000


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drawn(monkeypatch: pytest.MonkeyPatch, times: list[float], n_total: int = 80 * MB) -> list[str]:
    """The bars on a terminal where the clock reads `times`, at 8 MB more each time."""
    terminal, clock = Terminal(), Clock()
    monkeypatch.setattr(sys, "stderr", terminal)
    note = shown_progress("loading weights", LOG, clock)
    for i, now in enumerate(times, 1):
        clock.now = now
        note(8 * MB * i, n_total)
    return terminal.getvalue().split("\r")[1:]


def test_a_bar_redraws_itself_and_ends_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    bars = drawn(monkeypatch, [0.2 * i for i in range(1, 11)])
    assert bars[0] == f"loading weights [{'#' * 12}{' ' * 28}] 24 of 80 MB"
    assert len(bars) == 8
    assert bars[-1] == f"loading weights [{'#' * 40}] 80 of 80 MB\n"


def test_a_bar_draws_no_oftener_than_eyes_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    bars = drawn(monkeypatch, [0.6 + 0.005 * i for i in range(10)])
    assert [bar.endswith("\n") for bar in bars] == [False, True]


def test_what_is_done_in_a_moment_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drawn(monkeypatch, [0.01 * i for i in range(1, 11)]) == []


def test_an_unknown_total_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drawn(monkeypatch, [9.0, 10.0], n_total=0) == []


def test_a_log_gets_a_line_every_two_seconds(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    clock = Clock()
    note = shown_progress("loading weights", LOG, clock)
    with caplog.at_level(logging.INFO, "llamatrio.test"):
        for second in range(1, 6):
            clock.now = float(second)
            note(second * MB, 6 * MB)
    assert caplog.messages == ["loading weights: 33 % of 6 MB", "loading weights: 66 % of 6 MB"]
