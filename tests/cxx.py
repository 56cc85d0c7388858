"""The C++ compiler for what tests build: libraries are cached by the contents of what they are made of.

A result appears by rename, so that processes may build at the same time.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

MACHINE_FLAGS = ["-march=native"]
"""f16 conversions and fma are instructions then, not calls."""

NO_COMPILER = "needs g++ (or another C++ compiler named by CXX)"


class BuildError(Exception):
    """The compiler is missing or refused."""


def compiler() -> str | None:
    """The C++ compiler: $CXX, or g++ where it is installed."""
    return shutil.which(os.environ.get("CXX", "g++"))


def compile_cxx(*arguments: str) -> None:
    """Runs the compiler. Raises BuildError."""
    found = compiler()
    if found is None:
        raise BuildError("no C++ compiler: install g++, or set CXX")
    done = subprocess.run([found, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{found} {' '.join(arguments)}\n{done.stderr[-4000:]}")


def hash_of(paths: Iterable[Path]) -> str:
    """Names what these files and this processor's MACHINE_FLAGS give: 16 hex digits."""
    digest = hashlib.sha256(" ".join([*MACHINE_FLAGS, cpu_name()]).encode())
    for path in sorted(paths):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def cpu_name() -> str:
    """What -march=native depends on: a cache may travel between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
