"""A model from a hub: a small one over a real socket, asked by the library that asks the real one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import NamedTuple

import pytest

from llamatrio.errors import ModelError
from llamatrio.model.hugging_face import choose_file, fetch_from_hugging_face

FILES = {"README.md": b"words", "tiny-Q8_0.gguf": b"eight", "tiny-Q4_K_M.gguf": b"four", "mmproj-F16.gguf": b"eyes"}
COMMIT = "0" * 40


class _Hub(BaseHTTPRequestHandler):
    """The two routes of a hub that a download needs, for one repository."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        kind, body = self._find()
        self.send_response(200 if body is not None else 404)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(body or b"").hexdigest()}"')
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body or b"")))
        self.end_headers()
        if with_body and body:
            self.wfile.write(body)

    def _find(self) -> tuple[str, bytes | None]:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/me/tiny"):
            siblings = [{"rfilename": name} for name in FILES]
            found = {"_id": "1", "id": "me/tiny", "sha": COMMIT, "siblings": siblings, "tags": [], "private": False}
            tree = [{"type": "file", "path": name, "size": len(FILES[name]), "oid": "0"} for name in FILES]
            return "application/json", json.dumps(tree if "/tree/" in path else found).encode()
        return "application/octet-stream", FILES.get(path.rpartition("/")[2]) if "/me/tiny/resolve/" in path else None

    def log_message(self, *_: object) -> None: ...


class Hub(NamedTuple):
    endpoint: str
    cache: Path


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield Hub(f"http://127.0.0.1:{server.server_port}", tmp_path)
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize(
    ("repo", "file", "body"),
    [("me/tiny", None, b"four"), ("me/tiny:q8_0", None, b"eight"), ("me/tiny", "tiny-Q8_0.gguf", b"eight")],
)
def test_a_file_is_fetched_once_and_then_found_without_network(
    hub: Hub, repo: str, file: str | None, body: bytes
) -> None:
    path = fetch_from_hugging_face(repo, file, endpoint=hub.endpoint)
    assert path.read_bytes() == body
    assert hub.cache in path.parents
    assert fetch_from_hugging_face(repo, file, offline=True) == path


@pytest.mark.parametrize(
    ("repo", "file", "message"),
    [
        ("me/tiny:Q2_K", None, r"me/tiny holds no Q2_K; it has tiny-Q4_K_M.gguf, tiny-Q8_0.gguf"),
        ("me/other", None, "cannot fetch me/other from Hugging Face: "),
        ("me/tiny", "none.gguf", "cannot fetch me/tiny from Hugging Face: "),
        ("a/b/c", None, "cannot fetch a/b/c from Hugging Face: "),
    ],
)
def test_what_is_not_there_is_one_line_that_names_it(hub: Hub, repo: str, file: str | None, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        fetch_from_hugging_face(repo, file, endpoint=hub.endpoint)
    assert "\n" not in str(caught.value)


def test_what_was_never_fetched_is_not_there_offline(hub: Hub) -> None:
    with pytest.raises(ModelError, match="cannot fetch me/tiny"):
        fetch_from_hugging_face("me/tiny", offline=True)


@pytest.mark.parametrize(
    ("names", "quant", "chosen"),
    [
        (("b-Q8_0.gguf", "a-F16.gguf"), "", "a-F16.gguf"),
        (("a.Q4_K_M.gguf", "a.Q4_K_S.gguf"), "", "a.Q4_K_M.gguf"),
        (("a-Q4_K_M.gguf", "a-IQ4_XS.gguf"), "iq4_xs", "a-IQ4_XS.gguf"),
        (("q8_0/a-F16.gguf", "a-Q8_0.gguf"), "Q8_0", "a-Q8_0.gguf"),
        (("Q4_0-a-F16.gguf", "a-F16.gguf"), "F16", "Q4_0-a-F16.gguf"),
    ],
)
def test_the_quantization_chooses_the_file(names: tuple[str, ...], quant: str, chosen: str) -> None:
    assert choose_file(names, quant, "me/a") == chosen


def test_a_repository_without_a_model_is_refused() -> None:
    with pytest.raises(ModelError, match="me/a holds no GGUF model"):
        choose_file(["README.md", "mmproj-a.gguf"], "", "me/a")
