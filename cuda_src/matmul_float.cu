// matmul_float: as matmul_rows, for weights in F32, F16 or BF16 and f32 rows: products and sums in f32.
//
// W: -DTYPE, [n_out][k] or [n_expert][n_out][k] as in the file. x f32 rows. experts, bias, share, out, -DROWS, grid and
// block as in matmul_rows.cu; lane l takes the 8 weights 8 l ... of every 256. k a multiple of 8.
// Bytes moved: W once per ROWS rows; x from cache; 4 n_out a row written.
#include "planes.cuh"

constexpr int COLUMNS = 2;

__device__ __forceinline__ void load8(float* v, const u8* __restrict__ weights, long long at) {
    unsigned words[TYPE == T_F32 ? 8 : 4];
    load_words<TYPE == T_F32 ? 8 : 4>(words, weights + at * (TYPE == T_F32 ? 4 : 2));
#pragma unroll
    for (int e = 0; e < 8; ++e) {
        if (TYPE == T_F32) v[e] = __int_as_float(words[e % (TYPE == T_F32 ? 8 : 4)]);
        if (TYPE == T_F16) v[e] = half_bits(words[e / 2] >> (e % 2 * 16) & 0xffff);
        if (TYPE == T_BF16) v[e] = __int_as_float(words[e / 2] >> (e % 2 * 16) << 16);
    }
}

extern "C" __global__ void __launch_bounds__(128, 2)
matmul_float(const u8* __restrict__ weights, const float* __restrict__ x, const float* __restrict__ bias,
             const int* __restrict__ experts, float* __restrict__ out, int n_out, int k, int n_rows, int share,
             int out_stride) {
    const int column = (blockIdx.x * 4 + warp_id()) * COLUMNS, first_row = blockIdx.y * ROWS;
    const int expert = experts ? experts[first_row] : 0;
    if (column >= n_out || expert < 0) return;
    const long long base = (long long)expert * n_out;
    float sums[COLUMNS][ROWS] = {};
    for (int i = lane_id() * 8; i < k; i += WARP * 8) {
        float w[COLUMNS][8];
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) load8(w[c], weights, (base + min(column + c, n_out - 1)) * k + i);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const float4* row = (const float4*)(x + (long long)(min(first_row + r, n_rows - 1) / share) * k + i);
            const float4 low = row[0], high = row[1];
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) {  // spelt out, so that every ROWS rounds alike
                float sum = fmaf(w[c][0], low.x, sums[c][r]);
                sum = fmaf(w[c][3], low.w, fmaf(w[c][2], low.z, fmaf(w[c][1], low.y, sum)));
                sum = fmaf(w[c][5], high.y, fmaf(w[c][4], high.x, sum));
                sums[c][r] = fmaf(w[c][7], high.w, fmaf(w[c][6], high.z, sum));
            }
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) {
            const float sum = warp_sum(sums[c][r]);
            if (lane_id() != 0 || first_row + r >= n_rows || column + c >= n_out) continue;
            float* to = out + (long long)(first_row + r) * out_stride + column + c;
            *to = sum + (bias ? bias[base + column + c] : 0.0f);
        }
    }
}
