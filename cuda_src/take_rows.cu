// take_rows: out[i] = x[rows[i]]: the rows whose logits are wanted. f32 rows of k; a negative index gives zeros.
//
// Grid (n, ceil(k / 4 / threads)). k a multiple of 4. Bytes moved per row: 8 k.
#include "common.cuh"

extern "C" __global__ void take_rows(const float* __restrict__ x, const int* __restrict__ rows, float* __restrict__ out,
                                     int k) {
    const int i = blockIdx.y * blockDim.x + threadIdx.x, row = rows[blockIdx.x];
    if (i >= k / 4) return;
    const float4 v = row < 0 ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : ((const float4*)(x + (long long)row * k))[i];
    ((float4*)(out + (long long)blockIdx.x * k))[i] = v;
}
