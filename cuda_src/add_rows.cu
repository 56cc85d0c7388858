// add_rows: x += delta over n floats. Grid (ceil(n / 4 / threads)). n a multiple of 4. Bytes moved: 12 n.
#include "common.cuh"

extern "C" __global__ void add_rows(float4* __restrict__ x, const float4* __restrict__ delta, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n / 4) return;
    const float4 a = x[i], b = delta[i];
    x[i] = make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
