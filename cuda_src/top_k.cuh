// Keys that order logits: the larger logit first, of equal logits the lower id. No two keys of a row are equal, and 0
// stands for "none".
#pragma once
#include "common.cuh"

typedef unsigned long long Key;

constexpr int SLICE = 4096;  // logits of one block of top_k_part

__device__ __forceinline__ Key key_of(float logit, int id) {
    const unsigned bits = __float_as_uint(logit + 0.0f);  // -0 becomes 0
    const unsigned ordered = bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
    return (Key)ordered << 32 | (unsigned)~id;
}

__device__ __forceinline__ int key_id(Key key) { return (int)~(unsigned)key; }

__device__ __forceinline__ float key_logit(Key key) {
    const unsigned ordered = (unsigned)(key >> 32);
    return __uint_as_float(ordered ^ (ordered >> 31 ? 0x80000000u : 0xffffffffu));
}

// The block's largest key, to every thread. Holds two barriers.
__device__ __forceinline__ Key block_max_key(Key key) {
    __shared__ Key part[WARP];
#pragma unroll
    for (int d = WARP / 2; d; d >>= 1) {
        const Key other = __shfl_xor_sync(ALL_LANES, key, d);
        key = other > key ? other : key;
    }
    __syncthreads();
    if (lane_id() == 0) part[warp_id()] = key;
    __syncthreads();
    for (int w = 0; w < blockDim.x / WARP; ++w) key = part[w] > key ? part[w] : key;
    return key;
}
