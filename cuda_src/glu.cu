// glu: out = act(gate) * up, as -DOUT says (emit.cuh). -DACT=0 silu, 1 gelu (tanh form), 2 gpt-oss's clamped swiglu.
//
// gate and up are f32 rows, `stride` floats apart (one product of both matrices gives them side by side).
// Grid (rows), whole warps. k a multiple of 32, stride of 4. Bytes moved per row: 8 k read, the emitted row written.
#include "emit.cuh"

#define ACT_SILU 0
#define ACT_GELU 1
#define ACT_SWIGLU_OAI 2

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }

__device__ __forceinline__ float gated(float gate, float up) {
    if (ACT == ACT_SILU) return gate * sigmoid(gate) * up;
    // 0.5 (1 + tanh u) is sigmoid(2 u); u = sqrt(2 / pi) (x + 0.044715 x^3)
    if (ACT == ACT_GELU) return gate * sigmoid(1.5957691216f * gate * (1.0f + 0.044715f * gate * gate)) * up;
    const float x = fminf(gate, 7.0f), y = fminf(fmaxf(up, -7.0f), 7.0f);
    return x * sigmoid(1.702f * x) * (y + 1.0f);
}

extern "C" __global__ void glu(const float* __restrict__ gate, const float* __restrict__ up, int stride, int k,
                               void* out, void* extra) {
    const float4* gates = (const float4*)(gate + (long long)blockIdx.x * stride);
    const float4* ups = (const float4*)(up + (long long)blockIdx.x * stride);
    emit_row<OUT>(
        [=](int i) {
            const float4 g = gates[i], u = ups[i];
            return make_float4(gated(g.x, u.x), gated(g.y, u.y), gated(g.z, u.z), gated(g.w, u.w));
        },
        k, row_out(out, extra), blockIdx.x);
}
