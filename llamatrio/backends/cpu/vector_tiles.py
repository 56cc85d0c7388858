"""AMX: eight tile registers of 16 rows x 64 bytes."""

from __future__ import annotations

from llvmlite import ir

from llamatrio.backends.cpu.vector_core import Core
from llamatrio.backends.cpu.vector_types import Value, i8


class TileOps(Core):
    """Only on levels with has_amx."""

    def tile_config(self) -> None:
        """Makes every tile 16 rows of 64 bytes; comes before any other tile operation of a kernel."""
        content = bytearray(64)  # palette; from byte 16 columns in bytes (u16); from byte 48 rows (u8)
        content[0], content[16:32], content[48:56] = 1, bytes([64, 0] * 8), bytes([16] * 8)
        kind = ir.ArrayType(i8, len(content))
        config = ir.GlobalVariable(self.builder.module, kind, "tile_config")
        config.linkage, config.global_constant, config.align = "internal", True, 64
        config.initializer = ir.Constant(kind, content)
        self._void("llvm.x86.ldtilecfg", config)

    def tile_release(self) -> None:
        """Gives the tile state back; the end of a kernel that used tiles."""
        self._void("llvm.x86.tilerelease")

    def tile_zero(self, tile: int) -> None:
        """Clears tile `tile` (a Python int, as in all tile operations)."""
        self._void("llvm.x86.tilezero", _tile(tile))

    def tile_load(self, tile: int, base: Value, stride: Value = None) -> None:
        """Loads 16 rows of 64 bytes, `stride` bytes (i64; default 64) apart."""
        self._void("llvm.x86.tileloadd64", _tile(tile), base, self.int64(64) if stride is None else stride)

    def tile_load_streamed(self, tile: int, base: Value) -> None:
        """Loads a tile from 1,024 consecutive bytes without keeping them in the first-level cache."""
        self._void("llvm.x86.tileloaddt164", _tile(tile), base, self.int64(64))

    def tile_store(self, tile: int, base: Value, stride: Value) -> None:
        """Stores 16 rows of 64 bytes, `stride` bytes (i64) apart."""
        self._void("llvm.x86.tilestored64", _tile(tile), base, stride)

    def tile_dot_bf16(self, acc: int, a: int, b: int) -> None:
        """Tile acc (16 x 16 f32) += a (16 x 32 bf16) times b (32 x 16 bf16, in pairs of rows)."""
        self._void("llvm.x86.tdpbf16ps", _tile(acc), _tile(a), _tile(b))


def _tile(n: int) -> Value:
    return ir.Constant(i8, n)
