// How a kernel leaves one row for the matrix product that reads it. `value(i)` gives elements 4 i .. 4 i + 3, and may
// be called twice for the same i. A block of whole warps writes one row of k elements.
//
//   F32  out[k]
//   Q8   quants[k] (s8, blocks of 32), meta[k / 32]: x = scale * q, scale = max |x| / 127
//   F16  out[k] halves and one power of two: x = half * scale. Rows of any magnitude keep 11 bits.
#pragma once
#include "common.cuh"

#define OUT_F32 0
#define OUT_Q8 1
#define OUT_F16 2

// Of a block of 32 quants: the scale's bits, and the sums of the first and last 16 quants, which pay for minima.
struct __align__(8) BlockMeta {
    float scale;
    short sum[2];
};

// Where row r goes; the members that a variant does not use are null.
struct RowOut {
    float* f32;
    s8* quants;
    BlockMeta* meta;
    __half* f16;
    float* scale;
};

__device__ __forceinline__ float max_abs(float4 v) {
    return fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
}

__device__ __forceinline__ unsigned pack_s8(float4 v, float inverse) {
    const int a = __float2int_rn(v.x * inverse), b = __float2int_rn(v.y * inverse);
    const int c = __float2int_rn(v.z * inverse), d = __float2int_rn(v.w * inverse);
    return (a & 255) | (b & 255) << 8 | (c & 255) << 16 | (unsigned)d << 24;
}

template <class Value>
__device__ __forceinline__ void emit_f32(Value value, int k, float* out) {
    for (int i = threadIdx.x; i < k / 4; i += blockDim.x) ((float4*)out)[i] = value(i);
}

// Eight neighbouring lanes share a block of 32. k is a multiple of 32.
template <class Value>
__device__ __forceinline__ void emit_q8(Value value, int k, s8* quants, BlockMeta* meta) {
    for (int first = 0; first < k / 4; first += blockDim.x) {
        const int i = first + threadIdx.x;
        const bool inside = i < k / 4;
        const float4 v = inside ? value(i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        float top = max_abs(v);
#pragma unroll
        for (int d = 4; d; d >>= 1) top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, d));
        const unsigned q = pack_s8(v, top > 0.0f ? 127.0f / top : 0.0f);
        int sum = __dp4a((int)q, 0x01010101, 0);
        sum += __shfl_xor_sync(ALL_LANES, sum, 1);
        sum += __shfl_xor_sync(ALL_LANES, sum, 2);
        const int other = __shfl_xor_sync(ALL_LANES, sum, 4);
        if (!inside) continue;
        ((unsigned*)quants)[i] = q;
        if (i % 8 == 0) meta[i / 8] = {top / 127.0f, {(short)sum, (short)other}};
    }
}

// 2^-e and 2^e for the e that puts the row's largest magnitude in [2^14, 2^15), below a half's limit of 65504.
__device__ __forceinline__ float2 power_of_two_scale(float top) {
    const int exponent = max(__float_as_int(top) >> 23, 32);
    return make_float2(__int_as_float((268 - exponent) << 23), __int_as_float((exponent - 14) << 23));
}

template <class Value>
__device__ __forceinline__ void emit_f16(Value value, int k, __half* out, float* scale) {
    float top = 0.0f;
    for (int i = threadIdx.x; i < k / 4; i += blockDim.x) top = fmaxf(top, max_abs(value(i)));
    const float2 factor = power_of_two_scale(block_max(top));
    for (int i = threadIdx.x; i < k / 4; i += blockDim.x) {
        const float4 v = value(i);
        ((uint2*)out)[i] = make_uint2(pack_half2(v.x * factor.x, v.y * factor.x),
                                      pack_half2(v.z * factor.x, v.w * factor.x));
    }
    if (threadIdx.x == 0) *scale = factor.y;
}

// The variant that -DOUT chooses, for row r of `out`.
template <int OUT_KIND, class Value>
__device__ __forceinline__ void emit_row(Value value, int k, RowOut out, long long r) {
    if (OUT_KIND == OUT_F32) emit_f32(value, k, out.f32 + r * k);
    if (OUT_KIND == OUT_Q8) emit_q8(value, k, out.quants + r * k, out.meta + r * (k / 32));
    if (OUT_KIND == OUT_F16) emit_f16(value, k, out.f16 + r * k, out.scale + r);
}

// Every kernel that emits rows ends its parameters with these two addresses.
//   F32: out, null.  Q8: quants, meta.  F16: halves, scales.
__device__ __forceinline__ RowOut row_out(void* out, void* extra) {
    return {(float*)out, (s8*)out, (BlockMeta*)extra, (__half*)out, (float*)extra};
}
