"""How much memory the machine has left."""

from __future__ import annotations

import os
from pathlib import Path


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
