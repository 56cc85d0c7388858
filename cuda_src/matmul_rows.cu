// matmul_rows: out[r][o] = sum_k x[r][k] * W[o][k] + bias[o] for a few rows: weights are read once, x is int8 (dp4a).
//
// W: -DTYPE, planes (planes.cuh) of n_out rows, or of n_expert * n_out rows. x: Q8 rows (emit.cuh).
// experts  null, or i32 [n_rows]: row r multiplies with matrix experts[r] (a negative one: the row is skipped), adds
//          that expert's bias, and reads x row r / share. Then -DROWS=1. Without experts share is 1.
// Index map: a warp takes output columns o and o + 1 and -DROWS rows (1, 2, 4, 8, 16); lane l takes blocks of 32
// l, l + 32, ...: neighbours load neighbouring 16 bytes. A row's sum is the same for every ROWS.
// out f32 [n_rows][out_stride].
// Grid (ceil(n_out / 8), ceil(n_rows / ROWS)), 128 threads.
// Bytes moved: W once per ROWS rows; x from cache; 4 n_out a row written.
#include "emit.cuh"
#include "planes.cuh"

constexpr int COLUMNS = 2;

// x of one row and block: 32 quants, scale and sums.
struct Activations {
    int word[8];
    BlockMeta meta;
};

__device__ __forceinline__ Activations load_activations(const s8* __restrict__ x, const BlockMeta* __restrict__ meta,
                                                        long long block) {
    Activations a;
    *(int4*)a.word = ((const int4*)x)[2 * block];
    *(int4*)(a.word + 4) = ((const int4*)x)[2 * block + 1];
    *(int2*)&a.meta = ((const int2*)meta)[block];
    return a;
}

// sum + the block's product; fused multiply-adds are spelt out, so that every ROWS rounds alike.
__device__ __forceinline__ float add_dot(float sum, const Quants& q, const Scales& s, const Activations& a) {
    int first = 0, second = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        first = __dp4a(q.word[j], a.word[j], first);
        second = __dp4a(q.word[j + 4], a.word[j + 4], second);
    }
    const int x_first = a.meta.sum[0], x_second = a.meta.sum[1];
    float product;
    if (HAS_HALVES) {
        product = fmaf(s.scale[1], (float)second, s.scale[0] * (float)first);
        product = fmaf(-s.minimum[1], (float)x_second, fmaf(-s.minimum[0], (float)x_first, product));
    } else {
        product = s.scale[0] * (float)(first + second);
        if (HAS_MINIMUM) product = fmaf(-s.minimum[0], (float)(x_first + x_second), product);
    }
    return fmaf(product, a.meta.scale, sum);
}

extern "C" __global__ void __launch_bounds__(128, 2)
matmul_rows(const u8* __restrict__ weights, const s8* __restrict__ x, const BlockMeta* __restrict__ meta,
            const float* __restrict__ bias, const int* __restrict__ experts, float* __restrict__ out, int n_out, int k,
            int n_rows, int n_expert, int share, int out_stride) {
    const int column = (blockIdx.x * 4 + warp_id()) * COLUMNS, first_row = blockIdx.y * ROWS, n_blocks = k / 32;
    const int expert = experts ? experts[first_row] : 0;
    if (column >= n_out || expert < 0) return;
    const Planes planes(weights, (long long)n_expert * n_out * n_blocks);
    const long long base = (long long)expert * n_out;
    float sums[COLUMNS][ROWS] = {};
    for (int b = lane_id(); b < n_blocks; b += WARP) {
        Block block[COLUMNS];
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c)
            block[c] = load_block(planes, (base + min(column + c, n_out - 1)) * n_blocks + b);
        Quants q[COLUMNS];
        Scales s[COLUMNS];
#pragma unroll
        for (int c = 0; c < COLUMNS; ++c) q[c] = quants(block[c]), s[c] = scales(block[c]);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const long long row = min(first_row + r, n_rows - 1) / share;
            const Activations a = load_activations(x, meta, row * n_blocks + b);
#pragma unroll
            for (int c = 0; c < COLUMNS; ++c) sums[c][r] = add_dot(sums[c][r], q[c], s[c], a);
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
