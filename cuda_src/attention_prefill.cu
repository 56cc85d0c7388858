// attention_prefill: query rows of prompts against their sequences' scattered cells, on tensor cores.
//
// q, cell_table, sinks, out, windows and KV rows as in attention_decode.cu.
// tiles int4 [n_tiles]: (first row, n_rows, lane, first position): rows that follow each other in one sequence, at most
// 64 / group of them; n_rows 0 is padding. Rows of many sequences share a launch.
// Grid (n_tiles, n_head_kv), 128 threads. -DD head size, a multiple of 32; -DK_Q8, -DV_Q8.
//
// Index map: the tile's 64 fragment rows are (row, head of the group): m = row * group + head, so K and V are read once
// for the whole group; warp w has m in [16 w, 16 w + 16). Cells come CELLS at a time into shared memory as f16 (q8_0 is
// expanded on the way), their first entry a multiple of CELLS: a row's sums do not depend on its tile. While Q K runs
// V is under way, and the next K during the softmax and P V. Shared rows are 16 bytes longer than D halves, so that
// eight of them lie in different banks.
// Bytes moved: K and V of the seen cells once a tile; q and out once.
#include "attention.cuh"

constexpr int CELLS = D > 128 ? 16 : 64, ROW = D + 8, SPANS = D / 32, THREADS = 128;
// Spans of the query that each thread parks in shared memory, where registers are short.
constexpr int PARKED = D > 128 ? SPANS / 2 : 0;

// What a block works on.
struct Tile {
    int first_row, n_rows, lane, position, kv_head, group, n_head, n_head_kv;
    __device__ __forceinline__ int last() const { return position + n_rows - 1; }
    // Of fragment row m; rows beyond the tile take its last row's place and are not written.
    __device__ __forceinline__ int row(int m) const { return min(m / group, n_rows - 1); }
    __device__ __forceinline__ int head(int m) const { return kv_head * group + m % group; }
};

// Fragment i (of 16 dims) for the fragment rows g and g + 8 of the warp.
__device__ __forceinline__ void load_fragment(unsigned* a, const float* const* from, int i) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        const float2 v = *(const float2*)(from[r % 2] + 16 * i + r / 2 * 8 + 2 * fragment_quad());
        a[r] = pack_half2(v.x, v.y);
    }
}

// Entries first .. first + CELLS of the lane's cells into `to`; entries past the tile's last repeat it.
template <int Q8>
__device__ __forceinline__ void load_cells(__half (*to)[ROW], const u8* __restrict__ rows,
                                           const int* __restrict__ cells, int row_bytes, int first, Tile tile) {
    constexpr int VECTORS = D / (Q8 ? 16 : 8);
    for (int i = threadIdx.x; i < CELLS * VECTORS; i += THREADS) {
        const int c = i / VECTORS, v = i % VECTORS;
        const HeadRow row = head_row<Q8>(rows, cells[min(first + c, tile.last())], row_bytes, tile.kv_head, D,
                                         tile.n_head_kv * D);
        if (!Q8) {
            copy16(&to[c][8 * v], row.values + 16 * v);
            continue;
        }
        const uint4 bytes = *(const uint4*)(row.values + 16 * v);
        const __half scale = row.scales[v / 2];
        const uint2 a = dequantize4(bytes.x, scale), b = dequantize4(bytes.y, scale);
        const uint2 e = dequantize4(bytes.z, scale), f = dequantize4(bytes.w, scale);
        *(uint4*)&to[c][16 * v] = make_uint4(a.x, a.y, b.x, b.y);
        *(uint4*)&to[c][16 * v + 8] = make_uint4(e.x, e.y, f.x, f.y);
    }
    copy_commit();
}

struct Parked {
    uint4 fragment[PARKED ? 2 * PARKED : 1][THREADS];  // of thread t at t: nobody else reads it
};

// s[n] = Q K^T for cells 8 n ... `query` holds the spans from PARKED on.
__device__ __forceinline__ void multiply_keys(float (*s)[4], const Parked& parked, const unsigned (*query)[4],
                                              const __half (*keys)[ROW]) {
#pragma unroll
    for (int n = 0; n < CELLS / 8; ++n) {
        s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
#pragma unroll
        for (int span = 0; span < SPANS; ++span) {
            unsigned b[4];
            load_matrices(b, &keys[8 * n + lane_id() % 8][32 * span + lane_id() / 8 * 8]);
            if (span < PARKED) {
                const uint4 low = parked.fragment[2 * span][threadIdx.x];
                const uint4 high = parked.fragment[2 * span + 1][threadIdx.x];
                mma(s[n], (const unsigned*)&low, b[0], b[1]);
                mma(s[n], (const unsigned*)&high, b[2], b[3]);
                continue;
            }
            mma(s[n], query[2 * (span - PARKED)], b[0], b[1]);
            mma(s[n], query[2 * (span - PARKED) + 1], b[2], b[3]);
        }
    }
}

// Of fragment rows g and g + 8.
struct Softmax {
    float maximum[2], weight[2];
    int first[2], last[2];  // entries that the row sees
};

// Scores to weights in place, and the sums rescaled to the new maximum. Rows may see none of these cells.
__device__ __forceinline__ void soften(Softmax& state, float (*s)[4], float (*sums)[4], ScoreRule rule, int entry) {
    float top[2] = {state.maximum[0], state.maximum[1]};
#pragma unroll
    for (int n = 0; n < CELLS / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int half = i / 2, at = entry + 8 * n + 2 * fragment_quad() + i % 2;
            const bool seen = at >= state.first[half] && at <= state.last[half];
            s[n][i] = seen ? score(s[n][i], rule) : LOWEST;
            top[half] = fmaxf(top[half], s[n][i]);
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        top[half] = fmaxf(top[half], __shfl_xor_sync(ALL_LANES, top[half], 1));
        top[half] = fmaxf(top[half], __shfl_xor_sync(ALL_LANES, top[half], 2));
        const float keep = exp2f(state.maximum[half] - top[half]);
        state.maximum[half] = top[half];
        state.weight[half] *= keep;
#pragma unroll
        for (int n = 0; n < D / 8; ++n) sums[n][2 * half] *= keep, sums[n][2 * half + 1] *= keep;
    }
#pragma unroll
    for (int n = 0; n < CELLS / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            s[n][i] = s[n][i] == LOWEST ? 0.0f : exp2f(s[n][i] - top[i / 2]);
            state.weight[i / 2] += s[n][i];
        }
    }
}

// sums[n] += P V for dims 8 n ...
__device__ __forceinline__ void add_values(float (*sums)[4], const float (*p)[4], const __half (*values)[ROW]) {
#pragma unroll
    for (int k = 0; k < CELLS / 16; ++k) {
        const float *low = p[2 * k], *high = p[2 * k + 1];
        const unsigned a[4] = {pack_half2(low[0], low[1]), pack_half2(low[2], low[3]), pack_half2(high[0], high[1]),
                               pack_half2(high[2], high[3])};
#pragma unroll
        for (int n = 0; n < D / 8; n += 2) {
            unsigned b[4];
            load_matrices_transposed(b, &values[16 * k + lane_id() % 16][8 * n + lane_id() / 16 * 8]);
            mma(sums[n], a, b[0], b[1]);
            mma(sums[n + 1], a, b[2], b[3]);
        }
    }
}

__device__ __forceinline__ void write_rows(float* __restrict__ out, const float (*sums)[4], const Softmax& state,
                                           const float* __restrict__ sinks, Tile tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float weight = state.weight[half];
        weight += __shfl_xor_sync(ALL_LANES, weight, 1);
        weight += __shfl_xor_sync(ALL_LANES, weight, 2);
        const int m = warp_id() * 16 + fragment_group() + 8 * half, head = tile.head(m);
        if (m >= tile.n_rows * tile.group) continue;
        const float sink = sinks ? sinks[head] * LOG2E : LOWEST, top = fmaxf(state.maximum[half], sink);
        const float keep = exp2f(state.maximum[half] - top), factor = keep / (weight * keep + exp2f(sink - top));
        float* to = out + ((long long)(tile.first_row + tile.row(m)) * tile.n_head + head) * D + 2 * fragment_quad();
#pragma unroll
        for (int n = 0; n < D / 8; ++n)
            *(float2*)(to + 8 * n) = make_float2(sums[n][2 * half] * factor, sums[n][2 * half + 1] * factor);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, D > 64 ? 2 : 3)
attention_prefill(const float* __restrict__ q, const u8* __restrict__ k_rows, const u8* __restrict__ v_rows,
                  const int* __restrict__ cell_table, const int4* __restrict__ tiles, const float* __restrict__ sinks,
                  float* __restrict__ out, int q_stride, int table_stride, int n_head, int n_head_kv, int k_row_bytes,
                  int v_row_bytes, int window, float scale, float softcap) {
    __shared__ __align__(16) __half keys[CELLS][ROW], values[CELLS][ROW];
    __shared__ Parked parked;
    const int4 work = tiles[blockIdx.x];
    const Tile tile = {work.x, work.y, work.z, work.w, (int)blockIdx.y, n_head / n_head_kv, n_head, n_head_kv};
    if (tile.n_rows == 0) return;
    const int* cells = cell_table + (long long)tile.lane * table_stride;
    unsigned query[2 * (SPANS - PARKED)][4];
    const float* from[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int m = warp_id() * 16 + fragment_group() + 8 * half;
        from[half] = q + (long long)(tile.first_row + tile.row(m)) * q_stride + tile.head(m) * D;
    }
#pragma unroll
    for (int i = 0; i < 2 * PARKED; ++i) load_fragment((unsigned*)&parked.fragment[i][threadIdx.x], from, i);
#pragma unroll
    for (int i = 2 * PARKED; i < 2 * SPANS; ++i) load_fragment(query[i - 2 * PARKED], from, i);
    float sums[D / 8][4] = {};
    Softmax state = {{LOWEST, LOWEST}, {0.0f, 0.0f}, {}, {}};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        state.last[half] = tile.position + tile.row(warp_id() * 16 + fragment_group() + 8 * half);
        state.first[half] = first_seen(state.last[half], window);
    }
    int entry = first_seen(tile.position, window) / CELLS * CELLS;
    load_cells<K_Q8>(keys, k_rows, cells, k_row_bytes, entry, tile);
    for (; entry <= tile.last(); entry += CELLS) {
        float s[CELLS / 8][4];
        load_cells<V_Q8>(values, v_rows, cells, v_row_bytes, entry, tile);
        copy_wait<1>();
        __syncthreads();
        multiply_keys(s, parked, query, keys);
        __syncthreads();
        if (entry + CELLS <= tile.last()) load_cells<K_Q8>(keys, k_rows, cells, k_row_bytes, entry + CELLS, tile);
        else copy_commit();  // an empty group, so that the wait below still means V
        soften(state, s, sums, {scale, softcap}, entry);
        copy_wait<1>();
        __syncthreads();
        add_values(sums, s, values);
        __syncthreads();
    }
    copy_wait<0>();
    write_rows(out, sums, state, sinks, tile);
}
