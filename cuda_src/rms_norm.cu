// rms_norm: x += delta (where delta is given), then out = x / sqrt(mean(x^2) + eps) * weight, as -DOUT says (emit.cuh).
//
// Rows [rows][k] f32; x is the residual stream and is written back when there is a delta.
// Grid (rows), whole warps. k a multiple of 32. Bytes moved per row: 8 k read (12 k and 4 k written with a delta),
// and the emitted row; the second read comes from cache.
#include "emit.cuh"

extern "C" __global__ void rms_norm(float* x, const float* __restrict__ delta, const float* __restrict__ weight,
                                    float eps, int k, void* out, void* extra) {
    float4* row = (float4*)(x + (long long)blockIdx.x * k);
    const float4* added = (const float4*)(delta + (long long)blockIdx.x * k);
    const float4* w = (const float4*)weight;
    float squares = 0.0f;
    for (int i = threadIdx.x; i < k / 4; i += blockDim.x) {
        float4 v = row[i];
        if (delta) {
            const float4 d = added[i];
            v = make_float4(v.x + d.x, v.y + d.y, v.z + d.z, v.w + d.w);
            row[i] = v;
        }
        squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
    const float inverse = rsqrtf(block_sum(squares) / k + eps);
    emit_row<OUT>(
        [=](int i) {  // the same thread wrote row[i] above
            const float4 v = row[i], g = w[i];
            return make_float4(v.x * inverse * g.x, v.y * inverse * g.y, v.z * inverse * g.z, v.w * inverse * g.w);
        },
        k, row_out(out, extra), blockIdx.x);
}
