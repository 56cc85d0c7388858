"""Loads, stores and configurations: what they move, every form of an address, and whose the tiles are."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tests import emuamx

from .assembly import assembled, config, run

pytestmark = emuamx.needs_amx()


@pytest.mark.parametrize("name", ["tileloadd", "tileloaddt1"])
def test_loads_and_stores_move_the_tiles_rows_only(name: str) -> None:
    source = np.random.default_rng(0).integers(0, 256, (16, 80), np.uint8)
    out = np.full((16, 96), 0xCD, np.uint8)
    text = f"""
        ldtilecfg (%rdi)
        {name} (%rsi,%rcx), %tmm7
        tilestored %tmm7, (%rdx,%r8)
        tilerelease"""
    run(text, config(*[(1, 4)] * 7, (5, 12)), source, out, 80, 96)
    expected = np.full((16, 96), 0xCD, np.uint8)
    expected[:5, :12] = source[:5, :12]
    np.testing.assert_array_equal(out, expected)


def test_tilezero_clears_one_tile_and_ldtilecfg_all() -> None:
    source, out = np.full((16, 64), 7, np.uint8), np.full((3, 16, 64), 0xCD, np.uint8)
    text = """
        ldtilecfg (%rdi)
        tileloadd (%rsi,%rcx), %tmm0
        tileloadd (%rsi,%rcx), %tmm1
        tilezero %tmm0
        tilestored %tmm0, (%rdx,%rcx)
        tilestored %tmm1, 1024(%rdx,%rcx)
        ldtilecfg (%rdi)
        tilestored %tmm1, 2048(%rdx,%rcx)
        tilerelease"""
    run(text, config((16, 64), (16, 64)), source, out, 64)
    assert [set(tile.ravel()) for tile in out] == [{0}, {7}, {0}]


def test_sttilecfg_gives_the_configuration_back() -> None:
    given, out = config((3, 8), (16, 64)), np.full((3, 64), 0xCD, np.uint8)
    text = """
        ldtilecfg (%rdi)
        sttilecfg (%rsi)
        tilerelease
        sttilecfg 64(%rsi)
        ldtilecfg (%rdi)
        ldtilecfg (%rdx)
        sttilecfg 128(%rsi)"""
    run(text, given, out, np.zeros(64, np.uint8))  # palette 0 releases the tiles
    np.testing.assert_array_equal(out, [given, np.zeros(64), np.zeros(64)])


REGISTERS = ["rax", "rcx", "rdx", "rbx", "rbp", "rsi", "rdi", *(f"r{i}" for i in range(8, 16))]
"""All but rsp, which cannot point to anything but a stack."""
SAVED = ("rbx", "rbp", "r12", "r13", "r14", "r15")
STRIDE = 192


def loaded(place: str, base: str, index: str, scale: int = 1, displacement: int = 0) -> list[list[int]]:
    """Two rows of two words, loaded from `place` where its base plus its displacement points to counted words."""
    memory, out = np.arange(200, dtype=np.int32), np.zeros((2, 2), np.int32)
    text = f"""
        {" ; ".join(f"push %{name}" for name in SAVED)}
        push %rsi
        ldtilecfg (%rdi)
        movq %rdx, %xmm0
        movq %rcx, %xmm1
        movq %xmm0, %{base}
        movq %xmm1, %{index}
        tileloadd {place}, %tmm2
        pop %rsi
        mov $$8, %ecx
        tilestored %tmm2, (%rsi,%rcx)
        tilerelease
        {" ; ".join(f"pop %{name}" for name in reversed(SAVED))}"""
    run(text, config((1, 4), (1, 4), (2, 8)), out, memory.ctypes.data - displacement, STRIDE // scale)
    return out.tolist()


@pytest.mark.parametrize("base", REGISTERS)
def test_a_tile_is_loaded_from_any_base_and_index(base: str) -> None:
    for index in REGISTERS:
        if index != base:
            assert loaded(f"(%{base},%{index})", base, index) == [[0, 1], [48, 49]], index


@pytest.mark.parametrize("displacement", [0, 127, -128, 128, -100_000, 2**31 - 1])
@pytest.mark.parametrize("base", ["rax", "rbp", "r13"])
def test_scales_and_displacements(base: str, displacement: int) -> None:
    for scale in (1, 2, 4, 8):
        place = f"{displacement}(%{base},%r12,{scale})"
        assert loaded(place, base, "r12", scale, displacement) == [[0, 1], [48, 49]], scale


def test_without_an_index_every_row_is_the_same() -> None:
    for base in ("rax", "rbp", "r12"):
        assert loaded(f"8(%{base})", base, "r8") == [[2, 3], [2, 3]]


def test_a_tile_is_loaded_from_the_stack() -> None:
    text = """
        push %rdx
        push %rcx
        ldtilecfg (%rdi)
        tileloadd (%rsp,%r8), %tmm0
        tilestored %tmm0, (%rsi,%r8)
        tileloadd 8(%rsp), %tmm0
        tilestored %tmm0, 16(%rsi,%r8)
        tilerelease
        add $$16, %rsp"""
    out = np.zeros(4, np.int64)
    run(text, config((2, 8)), out, 11, 22, 8)
    assert out.tolist() == [22, 11, 11, 11]


def test_a_configuration_may_be_anywhere() -> None:
    """Base, index and displacement are an address here; and beside the code, as the kernels have it."""
    given, out = np.zeros(256, np.uint8), np.zeros((3, 64), np.uint8)
    given[84:148] = config((3, 8))
    text = f"""
        ldtilecfg 64(%rdi,%rdx,4)
        sttilecfg (%rsi)
        ldtilecfg 1f(%rip)
        sttilecfg -64(%rsi,%rcx,8)
        sttilecfg (,%r8,2)
        tilerelease
        ret
     1: .byte {",".join(map(str, config((16, 64), (4, 4))))}"""
    run(text, given, out, 5, 16, (out.ctypes.data + 128) // 2)
    np.testing.assert_array_equal(out, [config((3, 8)), *[config((16, 64), (4, 4))] * 2])


def test_tiles_are_a_threads_own() -> None:
    """Two threads configure and fill their tiles, and read them back once both have."""
    fill = """
        ldtilecfg (%rdi)
        tileloadd (%rsi,%rdx), %tmm0"""
    read = """
        tilestored %tmm0, (%rdi,%rsi)
        tilerelease"""
    both, outs = threading.Barrier(2), np.zeros((2, 16, 64), np.uint8)

    def use(i: int) -> None:
        run(fill, config((16 - i, 64)), np.full((16, 64), 1 + i, np.uint8), 64)
        both.wait(10)
        run(read, outs[i], 64)

    assembled(fill), assembled(read)
    threads = [threading.Thread(target=use, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert np.all(outs[0] == 1)
    assert np.all(outs[1, :15] == 2)
    assert np.all(outs[1, 15] == 0)
