// moe_plan: sorts a prompt's (row, expert) pairs by expert and cuts each expert's into tiles for matmul_tile.
//
// experts i32 [n_pairs], a negative one belongs to padding and is left out. order i32 [n_pairs]: pairs by expert,
// within one ascending. tiles int4 [n_tiles]: (expert, first in order, count <= tile_rows, 0); those not needed have
// count 0.
// n_tiles >= n_pairs / tile_rows + n_expert always suffices. n_expert at most 256.
// Grid (1), 1024 threads: a warp to an expert at a time, 32 pairs a step. Bytes moved: 4 n_pairs read n_expert / 32
// times from cache, 4 n_pairs and 16 n_tiles written.
#include "common.cuh"

constexpr int THREADS = 1024, WARPS = THREADS / WARP, MOST = 256;

// Calls take(pair, rank) for the expert's pairs in order; returns their number.
template <class Take>
__device__ __forceinline__ int for_pairs(const int* __restrict__ experts, int n_pairs, int expert, Take take) {
    int n = 0;
    for (int at = 0; at < n_pairs; at += WARP) {
        const int pair = at + lane_id();
        const bool hit = pair < n_pairs && experts[pair] == expert;
        const unsigned hits = __ballot_sync(ALL_LANES, hit);
        if (hit) take(pair, n + __popc(hits & ((1u << lane_id()) - 1)));
        n += __popc(hits);
    }
    return n;
}

extern "C" __global__ void __launch_bounds__(THREADS)
moe_plan(const int* __restrict__ experts, int* __restrict__ order, int4* __restrict__ tiles, int n_pairs, int n_expert,
         int n_tiles, int tile_rows) {
    __shared__ int counts[MOST], first_pair[MOST], first_tile[MOST + 1];
    for (int e = warp_id(); e < n_expert; e += WARPS) {
        const int n = for_pairs(experts, n_pairs, e, [](int, int) {});
        if (lane_id() == 0) counts[e] = n;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        int pairs = 0, n = 0;
        for (int e = 0; e < n_expert; ++e) {
            first_pair[e] = pairs, first_tile[e] = n;
            pairs += counts[e], n += (counts[e] + tile_rows - 1) / tile_rows;
        }
        first_tile[n_expert] = n;
    }
    __syncthreads();
    for (int e = warp_id(); e < n_expert; e += WARPS) {
        const int first = first_pair[e], n = counts[e];
        for_pairs(experts, n_pairs, e, [=](int pair, int rank) { order[first + rank] = pair; });
        for (int t = lane_id(); t * tile_rows < n; t += WARP)
            tiles[first_tile[e] + t] = make_int4(e, first + t * tile_rows, min(tile_rows, n - t * tile_rows), 0);
    }
    for (int t = first_tile[n_expert] + threadIdx.x; t < n_tiles; t += THREADS) tiles[t] = make_int4(0, 0, 0, 0);
}
