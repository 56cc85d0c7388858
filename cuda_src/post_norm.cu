// post_norm: x += rms(delta) * weight: gemma's norm on a sublayer's output, before the residual.
//
// Rows [rows][k] f32. Grid (rows), whole warps. k a multiple of 4. Bytes moved per row: 16 k.
#include "common.cuh"

extern "C" __global__ void post_norm(float* __restrict__ x, const float* __restrict__ delta,
                                     const float* __restrict__ weight, float eps, int k) {
    float4* row = (float4*)(x + (long long)blockIdx.x * k);
    const float4* d = (const float4*)(delta + (long long)blockIdx.x * k);
    const float4* w = (const float4*)weight;
    float squares = 0.0f;
    for (int i = threadIdx.x; i < k / 4; i += blockDim.x) {
        const float4 v = d[i];
        squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
    const float inverse = rsqrtf(block_sum(squares) / k + eps);
    for (int i = threadIdx.x; i < k / 4; i += blockDim.x) {
        const float4 a = row[i], v = d[i], g = w[i];
        row[i] = make_float4(a.x + v.x * inverse * g.x, a.y + v.y * inverse * g.y, a.z + v.z * inverse * g.z,
                             a.w + v.w * inverse * g.w);
    }
}
