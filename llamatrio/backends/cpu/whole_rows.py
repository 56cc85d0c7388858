"""Q8_0 packed so that a single row can be read, for a matrix of which a step reads a few rows only (screen.py).

16 rows are a group here too (formats.py), but they are not interleaved: of each row, 128 consecutive codes stand
together, two cache lines.

    block    4 x 16 scales f16 (block of 32 after block of 32), then 16 rows x 128 codes, unsigned

So a row of 640 weights is 20 lines and not 160. The price is a transposition in registers. The unpacked tile is that of
interleaved Q8_0, and what follows is the same code, so every product is the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from llamatrio.backends.cpu.activations import BLOCK_BYTES
from llamatrio.backends.cpu.compile import compile_kernel
from llamatrio.backends.cpu.formats import ROWS, Format, RawBlocks, Unpacked
from llamatrio.backends.cpu.levels import Level
from llamatrio.backends.cpu.rows import add_products
from llamatrio.backends.cpu.vector import Asm, Offset, Value, i8, i32, i64, vbytes, vec, vf32
from llamatrio.model.ggml_type import GGMLType

_TILES = 4
_CODES = 2 * ROWS * _TILES
"""Where the codes of a block begin."""
_ROW = 32 * _TILES
"""Bytes from one row's codes to the next one's."""
_GGUF_BLOCK = 34
"""d f16, then 32 signed codes."""


class _Q8Whole(Format):
    __slots__ = ()

    @property
    def name(self) -> str:
        return "q8_0_whole"

    @property
    def n_weights(self) -> int:
        return 32 * _TILES

    @property
    def tile_stride(self) -> int:
        return 2 * ROWS  # scales of a tile, and codes of a row

    def position(self, asm: Asm, offset: Value, index: Value) -> Value:
        return asm.mul(index, self.tile_bytes)

    def pack(self, asm: Asm, raw: RawBlocks, base: Value, offset: Offset) -> None:
        flip = asm.splat_int(0x80, i8, 32)
        for tile in range(_TILES):
            asm.store(raw.halves(_GGUF_BLOCK * tile), base, asm.add(offset, self.tile_stride * tile))
            for r, row in enumerate(raw.rows):
                codes = asm.builder.xor(asm.load(row, _GGUF_BLOCK * tile + 2, vec(i8, 32)), flip)
                asm.store(codes, base, asm.add(offset, _CODES + _ROW * r + self.tile_stride * tile))

    def unpack(self, asm: Asm, base: Value, offset: Offset, head: Sequence[Value]) -> Unpacked:
        rows = [asm.at(base, asm.add(offset, _CODES + _ROW * r)) for r in range(ROWS)]
        return self.tile_of(asm, rows, asm.load_f16(base, offset))

    def tile_of(self, asm: Asm, rows: Sequence[Value], scales: Value) -> Unpacked:
        """32 codes of each of 16 rows, and their scales, as a tile."""
        quads = _transposed(asm, [asm.load(row, 0, vec(i32, 8)) for row in rows])
        return Unpacked([asm.bitcast(quad, vbytes) for quad in quads], [scales], self.offset_minima(asm, [scales]))


Q8_WHOLE = _Q8Whole(GGMLType.Q8_0, stored_bits=8, scale_bytes=32, offset=128)


def score_kernel(level: Level | None = None) -> int:
    """Kernel (w, x, out, k, ids, n): out[id] (f32) = row id of w · x, for the n i32 at `ids`, a multiple of 16.

    x: one row in the form q8. 16 words behind the ids are read as well, and the rows that they name are asked for.
    """

    def emit(asm: Asm, w: Value, x: Value, out: Value, k: Value, ids: Value, n: Value) -> None:
        weights, source, target, wanted = (asm.pointer(address) for address in (w, x, out, ids))
        group_bytes = Q8_WHOLE.row_bytes(asm, k)

        def rows_at(first: Value) -> tuple[list[Value], list[Value], list[Value]]:
            """Numbers of the 16 rows from ids[first] on, and where the codes and the scales of each begin."""
            at = [asm.mul(asm.add(first, r), 4) for r in range(ROWS)]
            numbers = [asm.builder.sext(asm.load(wanted, offset, i32), i64) for offset in at]
            groups = [asm.at(weights, asm.mul(asm.div(number, ROWS), group_bytes)) for number in numbers]
            places = [asm.builder.and_(number, asm.int64(ROWS - 1)) for number in numbers]
            codes = [asm.at(g, asm.add(asm.mul(p, _ROW), _CODES)) for g, p in zip(groups, places, strict=True)]
            scales = [asm.at(g, asm.mul(p, 2)) for g, p in zip(groups, places, strict=True)]
            return numbers, codes, scales

        def sixteen(first: Value, _: list[Value]) -> list[Value]:
            numbers, codes, scales = rows_at(first)
            _, codes_ahead, scales_ahead = rows_at(asm.add(first, ROWS))

            def block(i: Value, acc: list[Value]) -> list[Value]:
                start = asm.mul(i, Q8_WHOLE.block_bytes)
                for row in (*scales_ahead, *codes_ahead):
                    for line in (0, 64):
                        asm.prefetch(row, asm.add(start, line), "L1")

                def tile(t: Value, acc: list[Value]) -> list[Value]:
                    at = asm.add(start, asm.mul(t, Q8_WHOLE.tile_stride))
                    halves = RawBlocks(asm, [asm.at(row, at) for row in scales]).halves(0)
                    unpacked = Q8_WHOLE.tile_of(asm, [asm.at(row, at) for row in codes], asm.f16_to_f32(halves))
                    record = asm.at(source, asm.mul(asm.add(asm.mul(i, _TILES), t), BLOCK_BYTES))
                    return add_products(asm, Q8_WHOLE, unpacked, [record], acc)

                return asm.loop(0, _TILES, acc, tile)

            (scores,) = asm.loop(0, asm.div(k, 32 * _TILES), [asm.zero(vf32)], block)
            for r, number in enumerate(numbers):
                asm.store(asm.lane(scores, r), target, asm.mul(number, 4))
            return []

        asm.loop(0, n, [], sixteen, step=ROWS)

    return compile_kernel("score_q8_0_whole", emit, level)


def _transposed(asm: Asm, rows: Sequence[Value]) -> list[Value]:
    """16 vectors of 8 words as 8 vectors of 16: two squares of 8 x 8 at once, rows 0 to 7 and 8 to 15.

    Words, then pairs of words are interleaved within quarters of a vector; then whole quarters change places.
    """
    both = [asm.concat([rows[r], rows[r + 8]]) for r in range(8)]

    def interleaved(a: Value, b: Value, picks: Sequence[int]) -> Value:
        """In each quarter: its words `picks`, from a below 4 and from b above."""
        return asm.shuffle(a, b, [4 * quarter + pick % 4 + 16 * (pick // 4) for quarter in range(4) for pick in picks])

    # twos[n][h] : words 2 h, 2 h + 1 of rows 2 n, 2 n + 1; fours[n][v]: word v of rows 4 n .. 4 n + 3.
    twos = [[interleaved(both[r], both[r + 1], p) for p in ((0, 4, 1, 5), (2, 6, 3, 7))] for r in (0, 2, 4, 6)]
    fours = [
        [interleaved(twos[n][h], twos[n + 1][h], p) for h in range(2) for p in ((0, 1, 4, 5), (2, 3, 6, 7))]
        for n in (0, 2)
    ]
    quarters = [[q + w for q in picks for w in range(4)] for picks in ((0, 16, 8, 24), (4, 20, 12, 28))]
    return [asm.shuffle(fours[0][v], fours[1][v], picks) for picks in quarters for v in range(4)]
