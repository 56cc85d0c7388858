// planar_rows: a matrix from GGUF's blocks to planes (planes.cuh), at load, on the device. -DTYPE: GGUF's number.
//
// gguf: the tensor's bytes, blocks without padding. planes: the matrix of n_blocks blocks of 32; see planes.cuh.
// Grid (ceil(n_blocks / 8)), 256 threads: a warp to a block of 32, a lane to a weight. GGUF is read byte by byte,
// since its blocks lie on odd addresses. Bytes moved: the tensor's, in and out, once.
#include "planes.cuh"

// Bytes of a GGUF block and the 32-blocks in it.
constexpr int SUPER = F.top_blocks;
constexpr int BYTES = TYPE == T_Q4_0   ? 18
                      : TYPE == T_Q4_1 ? 20
                      : TYPE == T_Q5_0 ? 22
                      : TYPE == T_Q5_1 ? 24
                      : TYPE == T_Q8_0 ? 34
                      : TYPE == T_Q2_K ? 84
                      : TYPE == T_Q3_K ? 110
                      : TYPE == T_Q4_K ? 144
                      : TYPE == T_Q5_K ? 176
                      : TYPE == T_Q6_K ? 210
                      : TYPE == T_IQ4_NL ? 18
                      : TYPE == T_IQ4_XS ? 136
                                         : 17;

__device__ __forceinline__ int nibble(const u8* p, int i) { return p[i & 15] >> (i / 16 * 4) & 15; }
__device__ __forceinline__ int bits2(int byte, int i) { return byte >> 2 * i & 3; }

// Quant of element i of sub-block s (of 32) in a GGUF block: the unsigned value, or Q8_0's signed byte.
__device__ __forceinline__ int quant(const u8* p, int s, int i) {
    switch (TYPE) {
        case T_Q4_0:
        case T_IQ4_NL: return nibble(p + 2, i);
        case T_Q4_1: return nibble(p + 4, i);
        case T_MXFP4: return nibble(p + 1, i);
        case T_Q5_0: return nibble(p + 6, i) | (p[2 + i / 8] >> i % 8 & 1) << 4;
        case T_Q5_1: return nibble(p + 8, i) | (p[4 + i / 8] >> i % 8 & 1) << 4;
        case T_Q8_0: return p[2 + i];
        case T_Q2_K: return bits2(p[16 + s / 4 * 32 + i], s % 4);
        case T_Q3_K: return bits2(p[32 + s / 4 * 32 + i], s % 4) | (p[i] >> s & 1) << 2;
        case T_Q4_K: return p[16 + s / 2 * 32 + i] >> s % 2 * 4 & 15;
        case T_Q5_K: return (p[48 + s / 2 * 32 + i] >> s % 2 * 4 & 15) | (p[16 + i] >> s & 1) << 4;
        case T_Q6_K:
            return (p[s / 4 * 64 + s % 2 * 32 + i] >> s % 4 / 2 * 4 & 15) | bits2(p[128 + s / 4 * 32 + i], s % 4) << 4;
        case T_IQ4_XS: return nibble(p + 8 + s * 16, i);
    }
    return 0;
}

// Q4_K's and Q5_K's 6-bit scale (low byte) and minimum (high byte) of sub-block s.
__device__ __forceinline__ int six_bit_pair(const u8* p, int s) {
    if (s < 4) return (p[s] & 63) | (p[s + 4] & 63) << 8;
    return (p[s + 4] & 15) | (p[s - 4] >> 6) << 4 | (p[s + 4] >> 4) << 8 | (p[s] >> 6) << 12;
}

// Q3_K's 6-bit scale of 16 weights, as a signed byte.
__device__ __forceinline__ int q3_scale(const u8* p, int s) {
    const int low = s < 8 ? p[s] & 15 : p[s - 8] >> 4;
    return (low | bits2(p[8 + s % 4], s / 4) << 4) - 32;
}

__device__ __forceinline__ int sub_scales(const u8* p, int s) {
    switch (TYPE) {
        case T_Q2_K: return p[2 * s] | p[2 * s + 1] << 8;
        case T_Q3_K: return (q3_scale(p + 96, 2 * s) & 255) | (q3_scale(p + 96, 2 * s + 1) & 255) << 8;
        case T_Q4_K:
        case T_Q5_K: return six_bit_pair(p + 4, s);
        case T_Q6_K: return p[192 + 2 * s] | p[193 + 2 * s] << 8;
        case T_IQ4_XS: return (p[4 + s / 2] >> s % 2 * 4 & 15 | bits2(p[2 + s / 4], s % 4) << 4) - 32;
    }
    return 0;
}

// Where the f16 scales (or MXFP4's exponent) lie in a GGUF block.
constexpr int TOP_AT = TYPE == T_Q2_K ? 80 : TYPE == T_Q3_K ? 108 : TYPE == T_Q6_K ? 208 : 0;

// The word of a plane that holds `width` bits of each lane's value, in planes.cuh's order.
template <int WIDTH>
__device__ __forceinline__ void write_bits(u8* plane, long long block, int value) {
    const int lane = lane_id();
    if (WIDTH == 8) plane[block * 32 + lane] = (u8)value;
    if (WIDTH == 4) {
        const int other = __shfl_down_sync(ALL_LANES, value, 16);
        if (lane < 16) plane[block * 16 + lane] = (u8)((value & 15) | (other & 15) << 4);
    }
    if (WIDTH == 2) {  // lane w * 4 + b makes byte b of word w: elements 16 w + b, + 4, + 8, + 12
        int byte = 0;
#pragma unroll
        for (int t = 0; t < 4; ++t)
            byte |= (__shfl_sync(ALL_LANES, value, lane / 4 % 2 * 16 + 4 * t + lane % 4) & 3) << 2 * t;
        if (lane < 8) plane[block * 8 + lane] = (u8)byte;
    }
    if (WIDTH == 1) {  // bit 8 b + j is element 4 j + b
        const int mine = __shfl_sync(ALL_LANES, value, lane % 8 * 4 + lane / 8);
        const unsigned word = __ballot_sync(ALL_LANES, mine & 1);
        if (lane == 0) ((unsigned*)plane)[block] = word;
    }
}

extern "C" __global__ void __launch_bounds__(256)
planar_rows(const u8* __restrict__ gguf, u8* __restrict__ planes, long long n_blocks) {
    const long long block = (long long)blockIdx.x * 8 + warp_id();
    if (block >= n_blocks) return;
    const Planes to(planes, n_blocks);
    const u8* p = gguf + block / SUPER * BYTES;
    const int s = (int)(block % SUPER), value = quant(p, s, lane_id());
    write_bits<F.low>((u8*)to.low, block, value);
    if (F.high) write_bits<F.high>((u8*)to.high, block, value >> F.low);
    const int sub = sub_scales(p, s);
    if (lane_id() < F.sub) ((u8*)to.sub)[block * F.sub + lane_id()] = (u8)(sub >> 8 * lane_id());
    if (s == 0 && lane_id() < F.top) ((u8*)to.top)[block / SUPER * F.top + lane_id()] = p[TOP_AT + lane_id()];
}
