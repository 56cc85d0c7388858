"""Runs a module on the emulated driver: python -m tests.emucuda.run MODULE [ARGUMENTS]."""

from __future__ import annotations

import runpy
import sys

from . import harness

if __name__ == "__main__":
    harness.install()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
