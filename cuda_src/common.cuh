// What every kernel shares. Rules of this folder:
//
//   1. One kernel to a file, `extern "C"` and named as the file; variants are macros (-DTYPE=12 -DROWS=4), so a
//      device compiles only what its model needs. A module holds exactly one entry point.
//   2. Pointers are 16-byte aligned unless the header comment says otherwise; bulk data moves in 16-byte accesses.
//   3. Everything that differs from step to step (tokens, positions, cells) is read from device memory and padding
//      rows are marked there, so that a captured graph can be replayed with other contents.
//   4. A row's numbers never depend on the other rows of the launch: the order of every sum is fixed by the row.
//   5. Nothing calls a function at run time and no table lives in constant memory: all is inlined.
#pragma once
#include <cuda_fp16.h>

typedef signed char s8;
typedef unsigned char u8;
typedef unsigned short u16;

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;
// Below every score and logit, yet finite, so that LOWEST - LOWEST is 0 and not NaN.
constexpr float LOWEST = -1.0e30f;
constexpr float LOG2E = 1.4426950408889634f;

__device__ __forceinline__ int lane_id() { return threadIdx.x & (WARP - 1); }
__device__ __forceinline__ int warp_id() { return threadIdx.x / WARP; }

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int d = WARP / 2; d; d >>= 1) v += __shfl_xor_sync(ALL_LANES, v, d);
    return v;
}

__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
    for (int d = WARP / 2; d; d >>= 1) v = fmaxf(v, __shfl_xor_sync(ALL_LANES, v, d));
    return v;
}

// Sum or maximum over a block of whole warps; every thread gets it. Holds two barriers.
__device__ __forceinline__ float block_sum(float v) {
    __shared__ float part[WARP];
    v = warp_sum(v);
    __syncthreads();
    if (lane_id() == 0) part[warp_id()] = v;
    __syncthreads();
    return warp_sum(lane_id() < blockDim.x / WARP ? part[lane_id()] : 0.0f);
}

__device__ __forceinline__ float block_max(float v) {
    __shared__ float part[WARP];
    v = warp_max(v);
    __syncthreads();
    if (lane_id() == 0) part[warp_id()] = v;
    __syncthreads();
    return warp_max(lane_id() < blockDim.x / WARP ? part[lane_id()] : LOWEST);
}

__device__ __forceinline__ float half_bits(unsigned bits) { return __half2float(__ushort_as_half((u16)bits)); }

__device__ __forceinline__ unsigned pack_half2(float low, float high) {
    __half2 h = __floats2half2_rn(low, high);
    return *(unsigned*)&h;
}

__device__ __forceinline__ float2 unpack_half2(unsigned bits) { return __half22float2(*(__half2*)&bits); }
