// attention_decode: one query row per sequence against its scattered cells; long sequences are split over blocks.
//
// q f32 [n_rows][q_stride]: heads of D side by side. lanes, positions i32 [n_rows].
// cell_table i32 [lanes][table_stride]. A row at a negative position is padding: its output is zeros.
// sinks f32 [n_head] or null.
// out f32 [n_rows][n_head * D]. partial f32 [n_rows][n_head][n_splits][D + 2]: sums, maximum (base 2), weight.
//
// A row that sees n cells is cut into parts of 128 cells, or of a multiple of 128 where that makes more than n_splits
// parts: the cut depends on the row alone. A row in one part writes `out`; the others are left to
// attention_combine.cu.
// Grid (n_rows, n_head_kv * ceil(group / 8), n_splits), 128 threads; blocks without a part return at once.
//
// Index map: the block's up to 8 query heads of one KV head are rows g of the tensor-core fragments (rows g + 8 are
// empty); each of the 4 warps takes 16 cells at a time, straight from global memory to registers: every K and V
// element is used by one warp only, so there is nothing to share.
//   Q K: along k the dims of 32 are dealt so that quad q holds dims 8 q .. 8 q + 7: 16 bytes of f16 per load.
//   P V: column g of tile t holds dim 4 g + t of each 32: lane (g, q) loads 8 bytes of f16 (4 of q8_0) of its cells.
// Bytes moved: K and V of the seen cells once per 8 heads of a group; partials 8 (D + 2) a split head.
// -DD head size, a multiple of 32; -DK_Q8, -DV_Q8.
#include "attention.cuh"

constexpr int WARPS = 4, STEP = 16, HEADS = 8, SPANS = D / 32;

// The query as A fragments, for all warps: dims 32 s + 8 q + {0..3} are fragment 2 s, {4..7} fragment 2 s + 1. Rows
// g + 8 are zeros and not kept.
__device__ __forceinline__ void load_query(uint2 (*to)[WARP], const float* __restrict__ q, bool inside) {
    for (int i = warp_id(); i < 2 * SPANS; i += WARPS) {
        const float4* from = (const float4*)(q + i / 2 * 32 + 8 * fragment_quad());
        const float4 v = inside ? from[i % 2] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        to[i][lane_id()] = make_uint2(pack_half2(v.x, v.y), pack_half2(v.z, v.w));
    }
}

// Eight dims (32 s + 8 q ...) of one cell's K.
__device__ __forceinline__ uint4 load_key(HeadRow row, int s) {
    const int at = 32 * s + 8 * fragment_quad();
    if (!K_Q8) return *(const uint4*)(row.values + 2 * at);
    const uint2 bytes = *(const uint2*)(row.values + at);
    const uint2 low = dequantize4(bytes.x, row.scales[s]), high = dequantize4(bytes.y, row.scales[s]);
    return make_uint4(low.x, low.y, high.x, high.y);
}

// Four dims (32 s + 4 g ...) of one cell's V.
__device__ __forceinline__ uint2 load_value(HeadRow row, int s) {
    const int at = 32 * s + 4 * fragment_group();
    if (!V_Q8) return *(const uint2*)(row.values + 2 * at);
    return dequantize4(*(const unsigned*)(row.values + at), row.scales[s]);
}

struct Softmax {
    float maximum, weight;     // of head g; the weight is this lane's share until `publish`
    float sums[4 * SPANS][2];  // tile 4 s + t, columns 2 q and 2 q + 1
};

// Scores of 16 cells for the heads g: p[n][i] is cell 8 n + 2 q + i.
__device__ __forceinline__ void scores16(float (*p)[2], const uint2 (*query)[WARP], const HeadRow* keys,
                                         ScoreRule rule, int first, int end) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        float c[4] = {};
#pragma unroll
        for (int s = 0; s < SPANS; ++s) {
            const uint4 key = load_key(keys[n], s);
            const uint2 low = query[2 * s][lane_id()], high = query[2 * s + 1][lane_id()];
            const unsigned a_low[4] = {low.x, 0, low.y, 0}, a_high[4] = {high.x, 0, high.y, 0};
            mma(c, a_low, key.x, key.y);
            mma(c, a_high, key.z, key.w);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const bool seen = first + 8 * n + 2 * fragment_quad() + i < end;
            p[n][i] = seen ? score(c[i], rule) : LOWEST;
        }
    }
}

// Takes 16 cells' scores into the maximum; leaves exp2(score - maximum) in p. The first cell is always seen.
__device__ __forceinline__ void rescale(Softmax& state, float (*p)[2]) {
    float top = fmaxf(fmaxf(p[0][0], p[0][1]), fmaxf(p[1][0], p[1][1]));
    top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 1));
    top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 2));
    top = fmaxf(top, state.maximum);
    const float keep = exp2f(state.maximum - top);
    state.maximum = top;
    state.weight *= keep;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            p[n][i] = exp2f(p[n][i] - top);
            state.weight += p[n][i];
        }
    }
#pragma unroll
    for (int t = 0; t < 4 * SPANS; ++t) state.sums[t][0] *= keep, state.sums[t][1] *= keep;
}

// sums += P V. cells[0..3]: those at 2 q, 2 q + 1, 2 q + 8, 2 q + 9 of the 16.
__device__ __forceinline__ void add_values(Softmax& state, const float (*p)[2], const HeadRow* cells) {
    const unsigned a[4] = {pack_half2(p[0][0], p[0][1]), 0, pack_half2(p[1][0], p[1][1]), 0};
#pragma unroll
    for (int s = 0; s < SPANS; ++s) {
        uint2 v[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) v[c] = load_value(cells[c], s);
#pragma unroll
        for (int t = 0; t < 4; ++t) {
            const unsigned pick = t % 2 ? 0x7632 : 0x5410;
            const unsigned b0 = t < 2 ? __byte_perm(v[0].x, v[1].x, pick) : __byte_perm(v[0].y, v[1].y, pick);
            const unsigned b1 = t < 2 ? __byte_perm(v[2].x, v[3].x, pick) : __byte_perm(v[2].y, v[3].y, pick);
            float* sums = state.sums[4 * s + t];
            float c[4] = {sums[0], sums[1], 0.0f, 0.0f};
            mma(c, a, b0, b1);
            sums[0] = c[0], sums[1] = c[1];
        }
    }
}

// What the warps found, each for its own cells.
struct Found {
    float sums[WARPS][HEADS][D], maxima[WARPS][HEADS], weights[WARPS][HEADS];
};

__device__ __forceinline__ void publish(Found& found, Softmax state) {
    const int g = fragment_group(), quad = fragment_quad(), w = warp_id();
    state.weight += __shfl_xor_sync(ALL_LANES, state.weight, 1);
    state.weight += __shfl_xor_sync(ALL_LANES, state.weight, 2);
    if (quad == 0) found.maxima[w][g] = state.maximum, found.weights[w][g] = state.weight;
#pragma unroll
    for (int t = 0; t < 4 * SPANS; ++t) {
#pragma unroll
        for (int i = 0; i < 2; ++i) found.sums[w][g][t / 4 * 32 + 4 * (2 * quad + i) + t % 4] = state.sums[t][i];
    }
}

// One dim of a head over all warps.
struct Joined {
    float sum, maximum, weight;
};

__device__ __forceinline__ Joined join(const Found& found, int head, int dim) {
    Joined all = {0.0f, LOWEST, 0.0f};
#pragma unroll
    for (int w = 0; w < WARPS; ++w) all.maximum = fmaxf(all.maximum, found.maxima[w][head]);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        const float keep = exp2f(found.maxima[w][head] - all.maximum);
        all.weight += found.weights[w][head] * keep;
        all.sum += found.sums[w][head][dim] * keep;
    }
    return all;
}

__device__ __forceinline__ float divided(Joined all, float sink) {
    const float top = fmaxf(all.maximum, sink), keep = exp2f(all.maximum - top);
    return all.sum * keep / (all.weight * keep + exp2f(sink - top));
}

extern "C" __global__ void __launch_bounds__(128, D > 128 ? 2 : D > 64 ? 3 : 4)
attention_decode(const float* __restrict__ q, const u8* __restrict__ k_rows, const u8* __restrict__ v_rows,
                 const int* __restrict__ cell_table, const int* __restrict__ lanes, const int* __restrict__ positions,
                 const float* __restrict__ sinks, float* __restrict__ out, float* __restrict__ partial, int q_stride,
                 int table_stride, int n_head, int n_head_kv, int k_row_bytes, int v_row_bytes, int window,
                 float scale, float softcap) {
    __shared__ uint2 query[2 * SPANS][WARP];
    __shared__ Found found;
    const int row = blockIdx.x, kv_head = blockIdx.y % n_head_kv, group = n_head / n_head_kv;
    const int in_group = blockIdx.y / n_head_kv * HEADS, heads = min(HEADS, group - in_group);
    const int head = kv_head * group + in_group, position = positions[row], split = blockIdx.z;
    float* to = out + ((long long)row * n_head + head) * D;
    if (position < 0) {
        if (split == 0)
            for (int i = threadIdx.x; i < heads * D; i += blockDim.x) to[i] = 0.0f;
        return;
    }
    const int begin = first_seen(position, window), n_seen = position + 1 - begin;
    const int part = part_cells(n_seen, gridDim.z);
    const int first = begin + split * part, end = min(first + part, position + 1);
    if (first > position) return;

    const int g = fragment_group(), quad = fragment_quad(), width = n_head_kv * D;
    const int* cells = cell_table + (long long)lanes[row] * table_stride;
    load_query(query, q + (long long)row * q_stride + (head + g) * D, g < heads);
    __syncthreads();
    Softmax state = {LOWEST, 0.0f, {}};
    for (int at = first + warp_id() * STEP; at < end; at += WARPS * STEP) {
        HeadRow keys[2], values[4];
        float p[2][2];
#pragma unroll
        for (int n = 0; n < 2; ++n)
            keys[n] = head_row<K_Q8>(k_rows, cells[min(at + 8 * n + g, end - 1)], k_row_bytes, kv_head, D, width);
#pragma unroll
        for (int c = 0; c < 4; ++c)
            values[c] = head_row<V_Q8>(v_rows, cells[min(at + c / 2 * 8 + 2 * quad + c % 2, end - 1)], v_row_bytes,
                                       kv_head, D, width);
        scores16(p, query, keys, {scale, softcap}, at, end);
        rescale(state, p);
        add_values(state, p, values);
    }
    publish(found, state);
    __syncthreads();
    for (int i = threadIdx.x; i < heads * D; i += blockDim.x) {
        const int h = i / D, dim = i % D;
        const Joined all = join(found, h, dim);
        if (n_seen <= part) {
            to[i] = divided(all, sinks ? sinks[head + h] * LOG2E : LOWEST);
            continue;
        }
        float* mine = partial + (((long long)row * n_head + head + h) * gridDim.z + split) * (D + 2);
        mine[dim] = all.sum;
        if (dim == 0) mine[D] = all.maximum, mine[D + 1] = all.weight;
    }
}
