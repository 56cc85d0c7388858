// moe_route: of each row's router logits the n_used largest, with the softmax over just those as weights.
//
// (A softmax over all experts whose chosen weights are then brought to sum 1 gives the same numbers.)
// logits f32 [n_rows][n_expert]; experts i32, weights f32 [n_rows][n_used], by descending logit, of equal ones the
// lower expert first. positions i32 [n_rows]: a negative one is padding: experts -1, weights 0.
// Grid (ceil(n_rows / 4)), 128 threads: a warp to a row. -DPER_LANE: ceil(n_expert / 32). Bytes moved: the logits once.
#include "common.cuh"

__device__ __forceinline__ int lowest_in_warp(int v) {
#pragma unroll
    for (int d = WARP / 2; d; d >>= 1) v = min(v, __shfl_xor_sync(ALL_LANES, v, d));
    return v;
}

extern "C" __global__ void __launch_bounds__(128)
moe_route(const float* __restrict__ logits, const int* __restrict__ positions, int* __restrict__ experts,
          float* __restrict__ weights, int n_rows, int n_expert, int n_used) {
    const int row = blockIdx.x * 4 + warp_id(), lane = lane_id();
    if (row >= n_rows) return;
    int* chosen = experts + (long long)row * n_used;
    float* weight = weights + (long long)row * n_used;
    if (positions[row] < 0) {
        for (int j = lane; j < n_used; j += WARP) chosen[j] = -1, weight[j] = 0.0f;
        return;
    }
    float mine[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
        const int e = i * WARP + lane;
        mine[i] = e < n_expert ? logits[(long long)row * n_expert + e] : LOWEST;
    }
    float first = 0.0f, sum = 0.0f;
    for (int j = 0; j < n_used; ++j) {
        float best = LOWEST;
        int at = n_expert;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i)
            if (mine[i] > best) best = mine[i], at = i * WARP + lane;
        const float top = warp_max(best);
        at = lowest_in_warp(best == top ? at : n_expert);
        if (j == 0) first = top;
        sum += expf(top - first);
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i)
            if (i * WARP + lane == at) mine[i] = LOWEST;
        if (lane == 0) chosen[j] = at, weight[j] = expf(top - first);
    }
    __syncwarp();
    for (int j = lane; j < n_used; j += WARP) weight[j] /= sum;
}
