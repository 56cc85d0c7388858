"""Levels, the kernel cache, and the operations of the assembler that differ between levels."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np
import pytest
from numba import njit

from llamatrio.backends.cpu import compile as compiling
from llamatrio.backends.cpu.call import call_kernel
from llamatrio.backends.cpu.compile import compile_kernel, emit_assembly, emit_ir, python_function
from llamatrio.backends.cpu.levels import LEVEL_NAMES, Level, code_fingerprint, current_level, find_level, host_levels
from llamatrio.backends.cpu.linear import linear_kernels
from llamatrio.backends.cpu.pack import FORMATS
from llamatrio.backends.cpu.rows import quantized_rows
from llamatrio.backends.cpu.vector import Asm, Value, vbytes, vf32
from llamatrio.model.ggml_type import GGMLType
from tests import emuamx

each_level = pytest.mark.parametrize("level", emuamx.levels(), ids=lambda level: level.name)


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty kernel cache, and a process that has compiled nothing."""
    monkeypatch.setenv("LLAMATRIO_CACHE", str(tmp_path))
    monkeypatch.setattr(compiling, "_addresses", {})
    return tmp_path


def emit_add_one(asm: Asm, address: Value) -> None:
    place = asm.pointer(address)
    asm.store(asm.fadd(asm.load(place, 0, vf32), asm.splat_f32(1.0)), place, 0)


def runs(address: int) -> bool:
    """Whether the kernel at `address` is emit_add_one."""
    x = np.arange(16, dtype=np.float32)
    python_function(address, 1)(x.ctypes.data)
    return bool(np.array_equal(x, np.arange(1, 17)))


def entries(cache: Path) -> list[Path]:
    return sorted(cache.rglob("*.o"))


# ---- levels


def test_levels_are_ordered_and_plain_is_always_there() -> None:
    names = [level.name for level in host_levels()]
    assert names[0] == "plain"
    assert names == sorted(names, key=LEVEL_NAMES.index)


def test_a_forced_level_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMATRIO_CPU_LEVEL", "plain")
    assert current_level().name == "plain"
    monkeypatch.delenv("LLAMATRIO_CPU_LEVEL")
    assert current_level() == host_levels()[-1]


def test_an_unknown_level_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMATRIO_CPU_LEVEL", "sse9")
    with pytest.raises(ValueError, match="'sse9'"):
        current_level()


def test_a_level_the_host_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llamatrio.backends.cpu.levels.host_levels", lambda: host_levels()[:1])
    with pytest.raises(ValueError, match="'amx'"):
        find_level("amx")


@pytest.mark.skipif(host_levels()[-1].cpu == "generic", reason="looks at x86 code")
@pytest.mark.parametrize(
    ("name", "has", "has_not"),
    [("plain", "pmaddwd", r"[yz]mm|vfmadd"), ("avx2", "vpmaddubsw", "zmm|vpdpbusd"), ("avx512", "vpdpbusd", r"tmm\d")],
)
def test_a_level_uses_only_its_own_instructions(name: str, has: str, has_not: str) -> None:
    if name not in [level.name for level in host_levels()]:
        pytest.skip(f"this processor lacks {name}")
    made = FORMATS[GGMLType.Q4_1]
    text = emit_assembly("looked_at", quantized_rows(made), find_level(name))  # type: ignore[arg-type]
    assert re.search(has, text)
    assert not re.search(has_not, text)


@pytest.mark.parametrize(("type", "has"), [(GGMLType.Q8_0, "sdot"), (GGMLType.IQ4_NL, "tbl")])
def test_aarch64_gets_its_instructions(type: GGMLType, has: str) -> None:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    level = Level("plain", "generic", "+dotprod", "sdot", row_tile=1)
    module = llvm.parse_assembly(str(emit_ir("arm", quantized_rows(FORMATS[type]), level)))  # type: ignore[arg-type]
    machine = llvm.Target.from_triple("aarch64-linux-gnu").create_target_machine("generic", features="+dotprod")
    assert has in machine.emit_assembly(module)


# ---- the cache


def test_a_kernel_is_compiled_once_and_found_again(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert runs(compile_kernel("add_one", emit_add_one))
    assert [entry.name for entry in entries(fresh_cache)] == [f"add_one.{current_level().name}.o"]

    monkeypatch.setattr(compiling, "_addresses", {})
    monkeypatch.setattr(compiling, "_build_object", None)  # calling it would fail
    assert runs(compile_kernel("add_one", emit_add_one))


@pytest.mark.parametrize("damage", [b"", b"short", None], ids=["empty", "short", "one bit"])
def test_a_damaged_entry_is_compiled_again(
    fresh_cache: Path, monkeypatch: pytest.MonkeyPatch, damage: bytes | None
) -> None:
    compile_kernel("add_one", emit_add_one)
    (entry,) = entries(fresh_cache)
    whole = bytearray(entry.read_bytes())
    whole[len(whole) // 2] ^= 1
    entry.write_bytes(bytes(whole) if damage is None else damage)

    monkeypatch.setattr(compiling, "_addresses", {})
    assert runs(compile_kernel("add_one", emit_add_one))
    monkeypatch.setattr(compiling, "_build_object", None)
    monkeypatch.setattr(compiling, "_addresses", {})
    assert runs(compile_kernel("add_one", emit_add_one)), "the entry was not mended"


def test_a_cache_that_cannot_be_written_is_no_obstacle(fresh_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fresh_cache / "kernels").write_text("a file where the folder should be")
    assert runs(compile_kernel("add_one", emit_add_one))


def test_the_fingerprint_tells_levels_apart() -> None:
    assert len({code_fingerprint(level) for level in emuamx.levels()}) == len(emuamx.levels())


def test_a_type_is_compiled_only_when_asked_for(fresh_cache: Path) -> None:
    linear_kernels(GGMLType.Q4_0)
    assert all("q4_0" in entry.name for entry in entries(fresh_cache))


def test_a_numba_function_calls_a_kernel() -> None:
    @njit(nogil=True)
    def twice(kernel: int, address: int) -> None:
        call_kernel(kernel, address)
        call_kernel(kernel, address)

    x = np.zeros(16, np.float32)
    twice(compile_kernel("add_one", emit_add_one), x.ctypes.data)
    assert np.all(x == 2)


# ---- operations that differ between levels


def vector_function(name: str, level: Level, body: Callable[[Asm, Value, Value], None]) -> Callable[..., None]:
    """A kernel (source, target) as a Python function."""

    def emit(asm: Asm, source: Value, target: Value) -> None:
        body(asm, asm.pointer(source), asm.pointer(target))

    return python_function(compile_kernel(name, emit, level), 2)


SPECIAL = np.array(
    [0, -0.0, 1e-8, 6e-8, 3e-8, 8.95e-8, 65504, 65519.9, 65520, np.inf, -np.inf, np.nan, 6.1e-5, 6.09e-5, 1 / 3, -2e-6],
    np.float32,
)


@each_level
def test_f16_round_trip(level: Level) -> None:
    def body(asm: Asm, source: Value, target: Value) -> None:
        asm.store_f16(asm.load(source, 0, vf32), target, 0)
        asm.store(asm.load_f16(target, 0), target, 32)

    run = vector_function("test_f16", level, body)
    rng = np.random.default_rng(0)
    for values in (SPECIAL, *(rng.standard_normal((50, 16)) * 10.0 ** rng.integers(-8, 6, (50, 1)))):
        x, out = values.astype(np.float32), np.empty(96, np.uint8)
        run(x.ctypes.data, out.ctypes.data)
        with np.errstate(over="ignore"):
            halves = x.astype(np.float16)
        np.testing.assert_array_equal(out[:32].view(np.float16), halves)
        np.testing.assert_array_equal(out[32:].view(np.float32), halves.astype(np.float32))


@each_level
def test_every_f16_becomes_the_right_f32(level: Level) -> None:
    run = vector_function(
        "test_f16_load", level, lambda asm, source, target: asm.store(asm.load_f16(source, 0), target, 0)
    )
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).reshape(-1, 16)
    out = np.empty(halves.shape, np.float32)
    for row, target in zip(halves, out, strict=True):
        run(row.ctypes.data, target.ctypes.data)
    np.testing.assert_array_equal(out, halves.astype(np.float32))


@each_level
def test_exp(level: Level) -> None:
    run = vector_function(
        "test_exp", level, lambda asm, source, target: asm.store(asm.exp(asm.load(source, 0, vf32)), target, 0)
    )
    x = np.linspace(-87.3, 88, 16 * 200, dtype=np.float32).reshape(-1, 16)
    out = np.empty_like(x)
    for source, target in zip(x, out, strict=True):
        run(source.ctypes.data, target.ctypes.data)
    np.testing.assert_allclose(out, np.exp(x.astype(np.float64)), rtol=2e-7)
    x[0, :3] = -88, -1e30, -np.inf
    run(x[0].ctypes.data, out[0].ctypes.data)
    assert np.all(out[0, :3] == 0)


@each_level
@pytest.mark.parametrize("bits", [2, 4, 5, 6, 7, 8])
def test_dot_is_exact_at_the_extremes(level: Level, bits: int) -> None:
    def body(asm: Asm, source: Value, target: Value) -> None:
        weights = [asm.load(source, 64 * n, vbytes) for n in range(8)]
        activations = [asm.load(source, 512 + 64 * n, vbytes) for n in range(8)]
        asm.store(asm.dot(weights, activations, bits), target, 0)
        asm.store(asm.dot_signed(weights, activations), target, 64)

    run = vector_function(f"test_dot_{bits}", level, body)
    rng = np.random.default_rng(bits)
    most = 2**bits - 1
    for _ in range(20):
        operands = np.empty((2, 8, 16, 4), np.uint8)
        operands[0] = rng.choice([0, 1, most // 2, most // 2 + 1, most], operands[0].shape)
        operands[1] = rng.choice(np.array([-127, -1, 0, 127], np.int8), operands[1].shape).view(np.uint8)
        if rng.random() < 0.3:  # everything at the end of its range
            operands[0], operands[1] = most, 127
        out = np.empty((2, 16), np.int32)
        run(operands.ctypes.data, out.ctypes.data)
        x = operands[1].view(np.int8).astype(np.int64)
        np.testing.assert_array_equal(out[0], (operands[0].astype(np.int64) * x).sum((0, 2)))
        np.testing.assert_array_equal(out[1], (operands[0].view(np.int8).astype(np.int64) * x).sum((0, 2)))
