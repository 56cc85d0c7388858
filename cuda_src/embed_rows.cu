// embed_rows: row `tokens[r]` of a matrix in planes (planes.cuh), times `scale`, as f32 [rows][k]. -DTYPE.
//
// A negative token is padding: its row becomes zeros. n_rows: rows of the matrix.
// Grid (rows), whole warps: a thread to a block of 32. k a multiple of 32. Bytes moved per row: the row's planes, 4 k.
#include "planes.cuh"

extern "C" __global__ void embed_rows(const u8* __restrict__ weights, const int* __restrict__ tokens,
                                      float* __restrict__ out, int n_rows, int k, float scale) {
    const int n_blocks = k / 32, token = tokens[blockIdx.x];
    const Planes planes(weights, (long long)n_rows * n_blocks);
    for (int b = threadIdx.x; b < n_blocks; b += blockDim.x) {
        float4* to = (float4*)(out + (long long)blockIdx.x * k + b * 32);
        const float factor = token < 0 ? 0.0f : scale;
        expand(load_block(planes, (long long)max(token, 0) * n_blocks + b), [=](int i, const float* v) {
            to[2 * i] = make_float4(v[0] * factor, v[1] * factor, v[2] * factor, v[3] * factor);
            to[2 * i + 1] = make_float4(v[4] * factor, v[5] * factor, v[6] * factor, v[7] * factor);
        });
    }
}
