"""Installing, registering, caching, and child processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from . import build, harness
from .control import Control

KERNEL = 'extern "C" __global__ void k(int* y) { y[threadIdx.x] = THING; }'

CHILD = """
import numpy as np
from cuda.core import Device
from tests.emucuda.helpers import Gpu
gpu = Gpu()
y = gpu.run('extern "C" __global__ void k(int* y) { y[threadIdx.x] = 7; }', np.zeros(4, np.int32))[0]
print(Device().name, y.tolist())
"""


def test_installing_twice_gives_the_same(emucuda: Control) -> None:
    assert harness.install() is emucuda


def test_a_child_process_sees_the_emulated_device(emucuda: Control, tmp_path: Path) -> None:
    (tmp_path / "child.py").write_text(CHILD)
    environment = {**os.environ, **harness.environment()}
    environment["PYTHONPATH"] += f":{tmp_path}"
    command = [sys.executable, "-m", "tests.emucuda.run", "child"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.stdout == "Emulated GPU [7, 7, 7, 7]\n", done.stderr


def test_macros_make_different_kernels(emucuda: Control) -> None:
    from .helpers import Gpu

    gpu = Gpu()
    for value in ("3", "4"):
        kernel = gpu.compile(KERNEL, define_macro=("THING", value)).get_kernel("k")
        y = gpu.upload(np.zeros(2, np.int32))
        gpu.launch(kernel, 1, 2, y)
        assert gpu.download(y, np.zeros(2, np.int32)).tolist() == [int(value)] * 2


def test_equal_cubins_run_the_ptx_that_was_compiled_last(emucuda_checked: Control) -> None:
    """The mask of a shuffle leaves no trace in a cubin, but matters to the checks."""
    from .helpers import Gpu

    gpu = Gpu()
    body = "if (threadIdx.x < 16) y[threadIdx.x] = __shfl_xor_sync({}, threadIdx.x, 1);"
    kinds = []
    for mask in ("~0u", "0xffffu"):
        gpu.run(f'extern "C" __global__ void k(int* y) {{ {body.format(mask)} }}', np.zeros(32, np.int32))
        kinds.append([finding.kind for finding in emucuda_checked.take_findings()])
    assert kinds == [["missing-lane"], []]


def test_a_kernel_is_built_once(emucuda: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    from .helpers import Gpu

    gpu = Gpu()
    source = 'extern "C" __global__ void k(int* y) { y[threadIdx.x] = 11; }'
    gpu.run(source, np.zeros(2, np.int32))
    emucuda.set_kernel_builder(build.kernel_dir(), "false")
    try:
        assert gpu.run(source, np.zeros(2, np.int32))[0].tolist() == [11, 11]
    finally:
        emucuda.set_kernel_builder(build.kernel_dir(), build.builder_command())


def test_the_reason_for_skipping_names_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert harness.missing() == "needs g++ (or another C++ compiler named by CXX)"
