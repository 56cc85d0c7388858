"""Compiling the kernels: every one for every architecture, the cache on disk, and what its key covers."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

pytest.importorskip("cuda.core")
if importlib.util.find_spec("nvidia.cu13") is None:
    pytest.skip("needs NVRTC: nvidia-cuda-nvrtc", allow_module_level=True)

from bench.kernels_report import ARCHITECTURES, ONE_OF_EACH, Variant, all_variants, compile_resources, variant
from llamatrio.backends.cuda import compiler
from llamatrio.backends.cuda.kernels.weights import WeightType
from llamatrio.errors import BackendError

HUNGRY = (
    variant("attention_decode", D=256, K_Q8=0, V_Q8=0),
    variant("attention_prefill", D=96, K_Q8=1, V_Q8=1),
    variant("attention_prefill", D=256, K_Q8=1, V_Q8=0),
    variant("attention_prefill", D=256, K_Q8=0, V_Q8=0),
    variant("matmul_rows", TYPE=WeightType.Q4_0, ROWS=16),
    variant("matmul_rows", TYPE=WeightType.Q6_K, ROWS=16),
    variant("matmul_float", TYPE=WeightType.F32, ROWS=16),
    variant("matmul_tile", TYPE=WeightType.F32, ROWS=128),
    variant("matmul_tile", TYPE=WeightType.Q5_K, ROWS=128),
)
"""The variants that use the most registers; `make kernels-report` looks at all of them."""


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_kernel_compiles(arch: str) -> None:
    for one in ONE_OF_EACH:
        found = compile_resources(one, arch)
        assert found.registers > 0, str(one)
        assert found.shared_bytes <= 48 << 10, f"{one} needs more shared memory than a block has by default"
        if arch != "sm_75":
            assert found.spill_bytes == 0, f"{one} spills {found.spill_bytes} bytes on {arch}"


@pytest.mark.parametrize("one", HUNGRY, ids=str)
def test_no_spills_where_registers_are_short(one: Variant) -> None:
    for arch in ("sm_80", "sm_90", "sm_120"):
        assert compile_resources(one, arch).spill_bytes == 0, arch


def test_the_report_covers_every_source_file() -> None:
    files = {path.stem for path in compiler.source_dir().glob("*.cu")}
    assert {one.name for one in ONE_OF_EACH} == files
    assert {one.name for one in all_variants()} == files


def test_every_kernel_says_its_grid_and_the_bytes_it_moves() -> None:
    for path in compiler.source_dir().glob("*.cu"):
        header = path.read_text().partition("#include")[0]
        assert header.startswith(f"// {path.stem}: "), path.name
        assert "grid" in header.lower(), path.name
        assert "bytes moved" in " ".join(header.lower().replace("//", "").split()), path.name


def test_a_kernel_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiler.KernelLoader("sm_80", tmp_path).compiled("add_rows", ())
    assert first.read_bytes().startswith(b"\x7fELF")
    assert ".entry add_rows" in first.with_suffix(".ptx").read_text()
    monkeypatch.setattr(compiler, "compile_kernel", None)
    assert compiler.KernelLoader("sm_80", tmp_path).compiled("add_rows", ()) == first
    assert len(list(tmp_path.iterdir())) == 2  # and no temporary file


def test_the_key_covers_all_that_matters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Macros, architecture, NVRTC, and any source file: a header as much as the kernel itself."""
    sources = tmp_path / "cuda_src"
    shutil.copytree(compiler.source_dir(), sources)

    def keys() -> set[str]:
        compiler.source_hash.cache_clear()
        variants = [("glu", (("OUT", 1),), "sm_80"), ("glu", (("OUT", 2),), "sm_80"), ("glu", (("OUT", 1),), "sm_90")]
        return {compiler.cache_key(*v) for v in variants}

    monkeypatch.setattr(compiler, "source_dir", lambda: sources)
    try:
        before = keys()
        assert len(before) == 3
        assert keys() == before
        (sources / "planes.cuh").write_text((sources / "planes.cuh").read_text() + "\n")
        assert not keys() & before
        between = keys()
        monkeypatch.setattr(compiler, "nvrtc_version", lambda: "99.9")
        assert not keys() & between
    finally:
        compiler.source_hash.cache_clear()


def test_order_of_macros_does_not_matter() -> None:
    one, other = (("A", 1), ("B", 2)), (("B", 2), ("A", 1))
    assert compiler.cache_key("k", one, "sm_80") == compiler.cache_key("k", other, "sm_80")


def test_a_compile_error_names_kernel_macros_and_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = tmp_path / "cuda_src"
    shutil.copytree(compiler.source_dir(), sources)
    (sources / "add_rows.cu").write_text('#include "common.cuh"\nthis is not C++\n')
    monkeypatch.setattr(compiler, "source_dir", lambda: sources)
    with pytest.raises(BackendError, match=r"add_rows \{'TYPE': 2\} does not compile for sm_80(.|\n)*add_rows.cu\(2\)"):
        compiler.compile_kernel("add_rows", (("TYPE", 2),), "sm_80")


def test_missing_sources_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiler, "__file__", str(tmp_path / "llamatrio/backends/cuda/compiler.py"))
    with pytest.raises(BackendError, match="_cuda_src"):
        compiler.source_dir.__wrapped__()
