// rope_store: what lies between the Q, K, V product and attention: head norm (Q, K), rope (Q, K), and the new cell.
//
// qkv   f32 [rows][stride]: n_head heads of Q, n_head_kv of K, n_head_kv of V, each D floats.
// q_norm, k_norm  f32 [D] or null.    positions, cells  i32 [rows]; a row whose cell is negative is padding.
// turns  float2 [n_dims / 2]: turns of pair i per position, as a high and a low float: all scalings of
//        rope are in this table, and their sum keeps the angle at any position. magnitude: YaRN's factor.
// Out: Q in place; K and V rows of `cells[r]`: -DK_Q8, -DV_Q8: 0 f16 [n_head_kv * D], 1 q8_0 (all int8 quants, then
//        all f16 scales of blocks of 32; quant bytes and the row are multiples of 16).
// With DK_Q8 and heads of 64 or more (mixes_keys in model/spec.py) each block of 32 of Q and K goes through a
// Walsh-Hadamard transform, last of all.
// -DNEOX=1 turns (i, i + n_dims / 2), 0 turns (2 i, 2 i + 1).  -DD: head size, a multiple of 32.
// Grid (rows, ceil((n_head + 2 n_head_kv) / 4)), 128 threads: a warp to a head.
// Bytes moved per row: 8 bytes a Q float, 4 a K or V float, and the cell's rows.
#include "common.cuh"

constexpr int PER_LANE = D / WARP;

// Lane l holds elements l, l + 32, ...: block b of 32 is register b across the warp.
__device__ __forceinline__ void store_q8(const float* v, s8* quants, __half* scales) {
#pragma unroll
    for (int b = 0; b < PER_LANE; ++b) {
        const float top = warp_max(fabsf(v[b]));
        const __half scale = __float2half(top / 127.0f);
        const float inverse = top > 0.0f ? 127.0f / top : 0.0f;
        quants[b * WARP + lane_id()] = (s8)__float2int_rn(v[b] * inverse);
        if (lane_id() == 0) scales[b] = scale;
    }
}

// Each block of 32 times the Walsh-Hadamard matrix over sqrt(32).
__device__ __forceinline__ void hadamard_blocks(float* v) {
#pragma unroll
    for (int b = 0; b < PER_LANE; ++b) {
        for (int apart = WARP / 2; apart > 0; apart /= 2) {
            const float other = __shfl_xor_sync(ALL_LANES, v[b], apart);
            v[b] = lane_id() & apart ? other - v[b] : other + v[b];
        }
        v[b] *= 0.17677669529663687f;
    }
}

template <int Q8>
__device__ __forceinline__ void store_head(const float* v, u8* cell_row, int head, int n_head_kv) {
    if (Q8) {
        store_q8(v, (s8*)cell_row + head * D, (__half*)(cell_row + n_head_kv * D) + head * PER_LANE);
        return;
    }
#pragma unroll
    for (int b = 0; b < PER_LANE; ++b) ((__half*)cell_row)[head * D + b * WARP + lane_id()] = __float2half(v[b]);
}

__device__ __forceinline__ void head_norm(float* v, const float* __restrict__ weight, float eps) {
    float squares = 0.0f;
#pragma unroll
    for (int b = 0; b < PER_LANE; ++b) squares += v[b] * v[b];
    const float inverse = rsqrtf(warp_sum(squares) / D + eps);
#pragma unroll
    for (int b = 0; b < PER_LANE; ++b) v[b] *= inverse * weight[b * WARP + lane_id()];
}

// Turns the pairs in the warp's own shared row; the angle is reduced to half a turn before sin and cos see it.
__device__ __forceinline__ void rope(float* head, const float2* __restrict__ turns, int n_dims, float position,
                                     float magnitude) {
    for (int i = lane_id(); i < n_dims / 2; i += WARP) {
        const float2 t = turns[i];
        const float whole = position * t.x;
        const float angle = whole - rintf(whole) + (fmaf(position, t.x, -whole) + position * t.y);
        float sine, cosine;
        sincospif(2.0f * angle, &sine, &cosine);
        const int a = NEOX ? i : 2 * i, b = NEOX ? i + n_dims / 2 : 2 * i + 1;
        const float x = head[a], y = head[b];
        head[a] = (x * cosine - y * sine) * magnitude;
        head[b] = (x * sine + y * cosine) * magnitude;
    }
}

extern "C" __global__ void __launch_bounds__(128)
rope_store(float* __restrict__ qkv, const float* __restrict__ q_norm, const float* __restrict__ k_norm,
           const int* __restrict__ positions, const int* __restrict__ cells, const float2* __restrict__ turns,
           u8* __restrict__ k_rows, u8* __restrict__ v_rows, int stride, int n_head, int n_head_kv, int n_dims,
           int k_row_bytes, int v_row_bytes, float eps, float magnitude) {
    __shared__ float heads[4][D];
    const int head = blockIdx.y * 4 + warp_id();
    const long long cell = cells[blockIdx.x];
    if (head >= n_head + 2 * n_head_kv || cell < 0) return;
    float* mine = qkv + (long long)blockIdx.x * stride + head * D;
    float v[PER_LANE];
#pragma unroll
    for (int b = 0; b < PER_LANE; ++b) v[b] = mine[b * WARP + lane_id()];
    if (head >= n_head + n_head_kv)
        return store_head<V_Q8>(v, v_rows + cell * v_row_bytes, head - n_head - n_head_kv, n_head_kv);
    const float* norm = head < n_head ? q_norm : k_norm;
    if (norm) head_norm(v, norm, eps);
    float* turned = heads[warp_id()];
#pragma unroll
    for (int b = 0; b < PER_LANE; ++b) turned[b * WARP + lane_id()] = v[b];
    __syncwarp();
    rope(turned, turns, n_dims, (float)positions[blockIdx.x], magnitude);
    __syncwarp();
#pragma unroll
    for (int b = 0; b < PER_LANE; ++b) v[b] = turned[b * WARP + lane_id()];
    if (K_Q8 && D >= 64) hadamard_blocks(v);
    if (head >= n_head) return store_head<K_Q8>(v, k_rows + cell * k_row_bytes, head - n_head, n_head_kv);
#pragma unroll
    for (int b = 0; b < PER_LANE; ++b) mine[b * WARP + lane_id()] = v[b];
}
