// moe_sum: out[r] = sum over a row's experts of weight * y: joins what the experts made of it.
//
// y f32 [n_rows * n_used][k] (pair r * n_used + j), weights f32 [n_rows][n_used], out f32 [n_rows][k]. A pair of
// weight 0 is not read (padding has none written). Grid (n_rows, ceil(k / 4 / threads)). k a multiple of 4.
// Bytes moved per row: 4 k (n_used + 1).
#include "common.cuh"

extern "C" __global__ void moe_sum(const float* __restrict__ y, const float* __restrict__ weights,
                                   float* __restrict__ out, int k, int n_used) {
    const int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= k / 4) return;
    const long long first = (long long)blockIdx.x * n_used;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int j = 0; j < n_used; ++j) {
        const float w = weights[first + j];
        if (w == 0.0f) continue;
        const float4 v = ((const float4*)(y + (first + j) * k))[i];
        sum = make_float4(fmaf(w, v.x, sum.x), fmaf(w, v.y, sum.y), fmaf(w, v.z, sum.z), fmaf(w, v.w, sum.w));
    }
    ((float4*)(out + (long long)blockIdx.x * k))[i] = sum;
}
