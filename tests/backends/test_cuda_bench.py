"""The benches of the CUDA backend run without a GPU: what they count holds here, what they time does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cuda.core")

from bench.calls import STAGING_BYTES, Case, count, fragmented, pipeline
from tests.emucuda import harness
from tests.emucuda.control import Control

CASES = [Case(10, 1), Case(10, 10), Case(323, 1), Case(323, 323), Case(1000, 323)]


def test_a_save_asks_the_driver_for_the_same_few_things_whatever_its_fragments(emucuda: Control) -> None:
    with pipeline() as (transfer, staging, record_bytes):
        assert staging.capacity == STAGING_BYTES // record_bytes
        for case in CASES:
            calls = count(emucuda, transfer, staging, fragmented(case))
            chunks = -(-case.n_cells // staging.capacity)
            assert (calls.chunks, calls.launches, calls.copies, calls.synchronizes) == (chunks, chunks, chunks, 0)
            assert (calls.list_uploads, calls.events, calls.stream_waits) == (chunks, 2 * chunks, chunks)
            assert calls.bytes == case.n_cells * record_bytes


def test_the_script_for_a_gpu_runs_to_its_json_line(emucuda: Control, tmp_path: Path) -> None:
    """bench/gpu.sh's measurements, on tiny sizes. Its figures are the emulated driver's and mean nothing."""
    command = [sys.executable, "-m", "tests.emucuda.run", "bench.gpu", "--small", "--out", str(tmp_path / "gpu.json")]
    environment = {**os.environ, **harness.environment()}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == json.loads((tmp_path / "gpu.json").read_text())
    assert found["device"] == "Emulated GPU, sm_80"
    for section in ("copies", "cells", "attention", "steps"):
        assert all(figure > 0 for figure in found[section].values()), section
