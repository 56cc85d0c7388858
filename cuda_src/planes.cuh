// Quantized weights as the kernels read them. GGUF's blocks have odd sizes (18, 34, 210 bytes) and scales packed in
// 6 bits; planar_rows.cu rearranges a matrix once, at load, into planes that all 16 types share:
//
//   low   4, 2 or 8 bits of each weight     high  1 or 2 more bits     sub  scales of 16 or 32     top  f16 scales
//
// Each plane runs over all blocks of 32 weights of the matrix, row by row, and starts on 16 bytes. So a lane takes a
// whole block of 32 in one 16-byte load (two for 8 bits, one of 8 bytes for 2 bits), neighbours take neighbouring
// blocks, and a type is only its line in the table below and its branch in `scales`. The price is that 6-bit scales
// take a byte each: Q4_K grows by 2.8 %, Q5_K 2.3 %, Q3_K 3.6 %, IQ4_XS 1.5 %; the others by nothing.
//
// Order inside a block (element e = 4 j + b is byte b of quant word j):
//   4 bits   16 bytes: byte i holds element i (low nibble) and i + 16
//   2 bits   2 words: element 4 j + b in word j / 4, bits 8 b + 2 (j % 4)
//   1 bit    1 word: element 4 j + b at bit 8 b + j
//   8 bits   32 bytes in order
// F32, F16 and BF16 stay as they are: one plane, in order.
//
// weight = scale * q - minimum, q >= 0 or a signed byte; offsets (Q4_0's 8, Q6_K's 32) are minima too.
#pragma once
#include "common.cuh"

// GGUF's type numbers.
#define T_F32 0
#define T_F16 1
#define T_Q4_0 2
#define T_Q4_1 3
#define T_Q5_0 6
#define T_Q5_1 7
#define T_Q8_0 8
#define T_Q2_K 10
#define T_Q3_K 11
#define T_Q4_K 12
#define T_Q5_K 13
#define T_Q6_K 14
#define T_IQ4_NL 20
#define T_IQ4_XS 23
#define T_BF16 30
#define T_MXFP4 39

struct Format {
    int low;        // bits a weight in the low plane
    int high;       // bits a weight in the high plane
    int sub;        // bytes a block of 32 in the sub plane
    int top;        // bytes an entry in the top plane
    int top_blocks; // blocks of 32 that share an entry of the top plane
};

__device__ constexpr Format format_of(int type) {
    return type == T_F32      ? Format{32, 0, 0, 0, 1}
           : type == T_F16    ? Format{16, 0, 0, 0, 1}
           : type == T_BF16   ? Format{16, 0, 0, 0, 1}
           : type == T_Q4_0   ? Format{4, 0, 0, 2, 1}
           : type == T_Q4_1   ? Format{4, 0, 0, 4, 1}
           : type == T_Q5_0   ? Format{4, 1, 0, 2, 1}
           : type == T_Q5_1   ? Format{4, 1, 0, 4, 1}
           : type == T_Q8_0   ? Format{8, 0, 0, 2, 1}
           : type == T_Q2_K   ? Format{2, 0, 2, 4, 8}
           : type == T_Q3_K   ? Format{2, 1, 2, 2, 8}
           : type == T_Q4_K   ? Format{4, 0, 2, 4, 8}
           : type == T_Q5_K   ? Format{4, 1, 2, 4, 8}
           : type == T_Q6_K   ? Format{4, 2, 2, 2, 8}
           : type == T_IQ4_NL ? Format{4, 0, 0, 2, 1}
           : type == T_IQ4_XS ? Format{4, 0, 1, 2, 8}
           : type == T_MXFP4  ? Format{4, 0, 0, 1, 1}
                              : Format{0, 0, 0, 0, 1};
}

// The module's type.
constexpr Format F = format_of(TYPE);
constexpr bool IS_FLOAT = TYPE == T_F32 || TYPE == T_F16 || TYPE == T_BF16;
constexpr bool HAS_TABLE = TYPE == T_IQ4_NL || TYPE == T_IQ4_XS || TYPE == T_MXFP4;
constexpr bool HAS_MINIMUM = !HAS_TABLE && TYPE != T_Q8_0;
constexpr bool HAS_HALVES = TYPE == T_Q2_K || TYPE == T_Q3_K || TYPE == T_Q6_K;  // a scale for each half of a block

struct Planes {
    const u8 *low, *high, *sub, *top;

    // Of a matrix of n_blocks blocks of 32 at `base`.
    __device__ __forceinline__ Planes(const u8* base, long long n_blocks) {
        low = base;
        high = low + padded(n_blocks * F.low * 4);
        sub = high + padded(n_blocks * F.high * 4);
        top = sub + padded(n_blocks * F.sub);
    }
    __device__ __forceinline__ static long long padded(long long bytes) { return (bytes + 15) / 16 * 16; }
};

// A block as loaded: the registers that a prefetch holds.
struct Block {
    unsigned low[F.low];
    unsigned high[F.high ? F.high : 1];
    unsigned sub, top;
};

template <int BYTES>
__device__ __forceinline__ unsigned load_small(const u8* p) {
    return BYTES == 4 ? *(const unsigned*)p : BYTES == 2 ? *(const u16*)p : BYTES == 1 ? *p : 0;
}

template <int WORDS>
__device__ __forceinline__ void load_words(unsigned* out, const u8* p) {
#pragma unroll
    for (int i = 0; i + 4 <= WORDS; i += 4) *(uint4*)(out + i) = *(const uint4*)(p + 4 * i);
    if (WORDS % 4 >= 2) *(uint2*)(out + WORDS / 4 * 4) = *(const uint2*)(p + WORDS / 4 * 16);
    if (WORDS % 2) out[WORDS - 1] = *(const unsigned*)(p + 4 * (WORDS - 1));
}

__device__ __forceinline__ Block load_block(const Planes& w, long long b) {
    Block block;
    load_words<F.low>(block.low, w.low + b * (F.low * 4));
    load_words<F.high>(block.high, w.high + b * (F.high * 4));
    block.sub = load_small<F.sub>(w.sub + b * F.sub);
    block.top = load_small<F.top>(w.top + b / F.top_blocks * F.top);
    return block;
}

struct Quants {
    int word[8];  // byte b of word j is element 4 j + b
};

// Four table entries by the four low nibbles of `nibbles`; the table is 16 signed bytes in four words.
__device__ __forceinline__ unsigned look_up4(unsigned nibbles, unsigned t0, unsigned t1, unsigned t2, unsigned t3) {
    const unsigned low = __byte_perm(t0, t1, nibbles & 0x7777), high = __byte_perm(t2, t3, nibbles & 0x7777);
    return __byte_perm(low, high, 0x3210 | (nibbles & 0x8888) >> 1);
}

// Elements in order from a word of 8 nibbles: bytes' low nibbles are elements 4 j .. , high nibbles 16 + 4 j ...
__device__ __forceinline__ void look_up8(unsigned word, int& first, int& second) {
    constexpr bool FP4 = TYPE == T_MXFP4;
    constexpr unsigned T0 = FP4 ? 0x03020100 : 0xbfad9881, T1 = FP4 ? 0x0c080604 : 0xf6eaddcf;
    constexpr unsigned T2 = FP4 ? 0xfdfeff00 : 0x26190d01, T3 = FP4 ? 0xf4f8fafc : 0x71594535;
    const unsigned a = look_up4(word, T0, T1, T2, T3), b = look_up4(word >> 16, T0, T1, T2, T3);
    first = __byte_perm(a, b, 0x6420);
    second = __byte_perm(a, b, 0x7531);
}

__device__ __forceinline__ Quants quants(const Block& block) {
    constexpr int HIGH_AT = F.high ? F.low : 0;
    Quants q;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        if (F.low == 8) q.word[j] = block.low[j];
        if (F.low == 4 && !HAS_TABLE) q.word[j] = block.low[j % 4] >> (j / 4 * 4) & 0x0f0f0f0f;
        if (F.low == 2) q.word[j] = block.low[j / 4] >> (j % 4 * 2) & 0x03030303;
        if (F.high == 1) q.word[j] |= (block.high[0] >> j & 0x01010101) << HIGH_AT;
        if (F.high == 2) q.word[j] |= (block.high[j / 4] >> (j % 4 * 2) & 0x03030303) << HIGH_AT;
    }
    if (HAS_TABLE) {
#pragma unroll
        for (int j = 0; j < 4; ++j) look_up8(block.low[j], q.word[j], q.word[j + 4]);
    }
    return q;
}

// Of the two halves of a block; types with one scale a block give it twice.
struct Scales {
    float scale[2], minimum[2];
};

__device__ __forceinline__ Scales scales(const Block& block) {
    const float d = half_bits(block.top & 0xffff), m = half_bits(block.top >> 16);
    const int a = block.sub & 0xff, b = block.sub >> 8 & 0xff;
    if (TYPE == T_Q4_0) return {{d, d}, {8.0f * d, 8.0f * d}};
    if (TYPE == T_Q5_0) return {{d, d}, {16.0f * d, 16.0f * d}};
    if (TYPE == T_Q4_1 || TYPE == T_Q5_1) return {{d, d}, {-m, -m}};
    if (TYPE == T_Q8_0 || TYPE == T_IQ4_NL) return {{d, d}, {0.0f, 0.0f}};
    if (TYPE == T_Q4_K || TYPE == T_Q5_K) return {{d * a, d * a}, {m * b, m * b}};
    if (TYPE == T_Q2_K) return {{d * (a & 15), d * (b & 15)}, {m * (a >> 4), m * (b >> 4)}};
    const float x = d * (s8)a, y = d * (s8)b;
    if (TYPE == T_Q3_K) return {{x, y}, {4.0f * x, 4.0f * y}};
    if (TYPE == T_Q6_K) return {{x, y}, {32.0f * x, 32.0f * y}};
    if (TYPE == T_IQ4_XS) return {{x, x}, {0.0f, 0.0f}};
    // MXFP4: half of 2^(e - 127), as the table holds doubled values; e = 0 and 1 are subnormal
    const float e = block.top < 2 ? __int_as_float(0x00200000 << block.top) : __int_as_float((block.top - 1) << 23);
    return {{e, e}, {0.0f, 0.0f}};
}

// The block's 32 weights in order, eight at a time: `take(i, values)` gets elements 8 i .. 8 i + 7.
template <class Take>
__device__ __forceinline__ void expand(const Block& block, Take take) {
    float v[8];
    if (IS_FLOAT) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                if (TYPE == T_F32) v[e] = __int_as_float(block.low[8 * i + e]);
                if (TYPE == T_F16) v[e] = half_bits(block.low[4 * i + e / 2] >> (e % 2 * 16) & 0xffff);
                if (TYPE == T_BF16) v[e] = __int_as_float(block.low[4 * i + e / 2] >> (e % 2 * 16) << 16);
            }
            take(i, v);
        }
        return;
    }
    const Quants q = quants(block);
    const Scales s = scales(block);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int e = 0; e < 8; ++e)
            v[e] = s.scale[i / 2] * (float)(s8)(q.word[2 * i + e / 4] >> (e % 4 * 8)) - s.minimum[i / 2];
        take(i, v);
    }
}
