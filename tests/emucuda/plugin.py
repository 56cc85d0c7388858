"""Pytest fixtures of the emulated driver; tests/conftest.py shows them to all tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from . import harness
from .control import Control


def _installed() -> Control:
    reason = harness.missing()
    if reason:
        pytest.skip(f"emulated CUDA driver: {reason}")
    return harness.install()


def _finish(control: Control) -> None:
    """Lets what is held run out, and fails the test for findings and errors that it did not take."""
    findings, error = control.take_findings(), control.context_error()
    control.reset()
    control.settle()
    findings += control.take_findings()
    assert not findings, "\n".join(f"{f.kind} at {f.where} in {f.operation}: {f.message}" for f in findings)
    assert not error, f"the context is broken: {error}"


@pytest.fixture
def emucuda() -> Iterator[Control]:
    """The emulated driver without checks: fast. Findings that a test leaves behind fail it."""
    control = _installed()
    gc.collect(1)  # what earlier tests left is freed now, not in the middle of this one
    control.reset()
    control.settle()
    yield control
    _finish(control)


@pytest.fixture
def emucuda_checked(emucuda: Control) -> Iterator[Control]:
    """The emulated driver with every check on; two to three times slower."""
    with emucuda.checked():
        yield emucuda
