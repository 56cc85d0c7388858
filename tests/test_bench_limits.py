"""The bench of the machine's limits runs at every level; what it measures is not a test's business."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import limits
from tests import emuamx


@pytest.mark.parametrize("level", [level.name for level in emuamx.levels()])
def test_it_prints_every_kernels_share(level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "limits.json"
    arguments = ["--shape", "64,512", "--types", "Q4_1,F16,Q8_0-sketch", "--seconds", "0.01", "--threads", "1"]
    monkeypatch.setattr("sys.argv", ["limits", *arguments, "--level", level, "--out", str(out)])
    monkeypatch.setattr(limits, "TURNS", 20_000)
    with emuamx.forced(level):
        limits.main()
    result = json.loads(out.read_text())
    assert [line["type"] for line in result["types"]] == ["Q4_1", "F16", "Q8_0-sketch"]
    assert ("tiles" in result["limits"]) == (level == "amx")
    for line in result["types"]:
        shares = [line[f"rows{m}_a"] for m in limits.ROW_COUNTS] + [line["prompt_a"]]
        assert min(shares) > 0, line
