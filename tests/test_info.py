"""`llamatrio info`: every file that can be read is described, whatever device may run it."""

from __future__ import annotations

from pathlib import Path

import pytest

from llamatrio import info
from llamatrio.cli.main import main

GOLDEN = Path(__file__).parent / "golden/models"
MODELS = sorted([*GOLDEN.glob("*-f16.gguf"), *(GOLDEN / "more").glob("*.gguf")])


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_every_architecture_is_described(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(path), "-c", "1000", "-v"]) == 0
    text = capsys.readouterr().out
    arch = path.stem.removeprefix("tiny-").rsplit("-", 1)[0]
    assert f"architecture  {arch}, " in text
    assert "MiB at 1000 tokens with q8_0 KV" in text
    assert ("experts" in text) == (arch in ("qwen3moe", "gpt-oss"))


@pytest.mark.parametrize("sketch_mib", [0, 5])
def test_a_sketch_of_the_head_counts(
    sketch_mib: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = GOLDEN / "tiny-llama-f16.gguf"
    monkeypatch.setattr(info, "sketch_bytes", lambda file, spec: sketch_mib << 20)
    assert main(["info", str(path), "-c", "100000"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "with f16 KV" in line]
    bytes_a_token = int(line.partition("(")[2].split()[0])
    assert int(line.split()[1]) == round((path.stat().st_size + 100_000 * bytes_a_token) / 2**20) + sketch_mib
    assert ("5 MiB for a sketch of the head" in line) == bool(sketch_mib)


def test_what_is_no_model_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.gguf").write_bytes(b"nothing")
    assert main(["info", str(tmp_path / "a.gguf")]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
