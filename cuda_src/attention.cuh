// What the attention kernels share: how a score is made, and rows of K and V in f16 or q8_0.
//
// A sequence's cells stand in its row of the cell table in position order: entry i is the cell of position i. A row at
// position p sees the entries (p - window, p], or [0, p] without a window. K and V rows: see rope_store.cu.
// Scores are kept in base 2: exp2(score - maximum).
#pragma once
#include "tensor.cuh"

struct ScoreRule {
    float scale;    // on q . k
    float softcap;  // 0: none
};

__device__ __forceinline__ float score(float dot, ScoreRule rule) {
    float s = dot * rule.scale;
    if (rule.softcap > 0.0f) s = rule.softcap * tanhf(s / rule.softcap);
    return s * LOG2E;
}

// First entry that a row at `position` sees.
__device__ __forceinline__ int first_seen(int position, int window) {
    return window > 0 ? max(0, position - window + 1) : 0;
}

// Cells in a part of a row that sees n_seen, when at most n_splits parts may be made: the row alone decides.
__device__ __forceinline__ int part_cells(int n_seen, int n_splits) {
    constexpr int PART = 128;
    return (n_seen + n_splits * PART - 1) / (n_splits * PART) * PART;
}

// A K or V row's part that belongs to one head.
struct HeadRow {
    const u8* values;      // f16, or int8 quants
    const __half* scales;  // q8_0 only
};

// `rows` + cell * row_bytes; `width` = n_head_kv * D. Quant block b of the head has scales[b].
template <int Q8>
__device__ __forceinline__ HeadRow head_row(const u8* rows, long long cell, int row_bytes, int head, int head_dim,
                                            int width) {
    const u8* row = rows + cell * row_bytes;
    if (!Q8) return {row + head * head_dim * 2, nullptr};
    return {row + head * head_dim, (const __half*)(row + width) + head * (head_dim / 32)};
}

// Four int8 quants times their scale, as two pairs of halves. int8 becomes f16 by the bits of 1024 + (q + 128).
__device__ __forceinline__ uint2 dequantize4(unsigned quants, __half scale) {
    const unsigned biased = quants ^ 0x80808080;
    const unsigned low = __byte_perm(biased, 0x64646464, 0x4140), high = __byte_perm(biased, 0x64646464, 0x4342);
    const __half2 offset = __float2half2_rn(1152.0f), s = __half2half2(scale);
    const __half2 a = __hmul2(__hsub2(*(const __half2*)&low, offset), s);
    const __half2 b = __hmul2(__hsub2(*(const __half2*)&high, offset), s);
    return make_uint2(*(const unsigned*)&a, *(const unsigned*)&b);
}
