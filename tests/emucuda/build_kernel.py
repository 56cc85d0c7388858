"""Builds one kernel object: build_kernel.py FOLDER ENTRY STEM. The driver runs it; an error goes to STEM.err."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from tests.cxx import BuildError  # noqa: E402
from tests.emucuda.build import build_kernel  # noqa: E402
from tests.emucuda.ptx.parser import PtxError  # noqa: E402


def main(folder: str, entry: str, stem: str) -> int:
    problem = Path(stem + ".err")
    problem.unlink(missing_ok=True)
    try:
        build_kernel(Path(folder) / "module.ptx", entry, Path(stem + ".so"))
    except (PtxError, BuildError) as error:
        problem.write_text(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
