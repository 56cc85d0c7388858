// matmul_tile: out[r][o] = scale[r] * sum_k x[r][k] * W[o][k] + bias[o] for many rows, on tensor cores.
//
// W: -DTYPE, planes (planes.cuh); a block of 32 weights at a time becomes f16 in shared memory. x: F16 rows (emit.cuh):
// halves [rows][k] and a scale a row. out f32 [rows][out_stride]. bias f32 or null. k a multiple of 32.
// Without experts: tiles and order are null, block y takes rows y * ROWS ...
// With experts: tiles int4 [gridDim.y] (expert, first, count, -), count 0 is padding; fragment row i of a tile is pair
// p = order[first + i]: x row p / share, out row p, the expert's matrix and bias.
//
// Index map: a block makes ROWS x 128 results (-DROWS=16, 64, 128), k 32 at a time; warp w has columns 32 w .. + 31,
// expands just the weights it will use (lane l: column 32 w + l, the whole block of 32), and loads the next ones while
// it multiplies. x goes through two buffers: one barrier a step. Shared rows of 80 bytes: eight lie in different banks.
// A row's sum is the same for every ROWS.
// Grid (ceil(n_out / 128), tiles), 128 threads. Bytes moved: W once per ROWS rows, x once per 128 columns.
#include "planes.cuh"
#include "tensor.cuh"

constexpr int COLUMNS = 128, STEP = 32, ROW = STEP + 8, THREADS = 128;

// The rows of a block's tile.
struct Tile {
    int expert, first, count, share;
    const int* order;
    __device__ __forceinline__ int pair(int i) const { return order ? order[first + i] : first + i; }
    // Rows past the count repeat the last and are not written.
    __device__ __forceinline__ int x_row(int i) const { return pair(min(i, count - 1)) / share; }
};

__device__ __forceinline__ Tile this_tile(const int4* __restrict__ tiles, const int* __restrict__ order, int n_rows,
                                          int share) {
    if (!tiles) return {0, (int)blockIdx.y * ROWS, min(ROWS, n_rows - (int)blockIdx.y * ROWS), 1, nullptr};
    const int4 tile = tiles[blockIdx.y];
    return {tile.x, tile.y, tile.z, share, order};
}

// Columns k .. k + 31 of the tile's x rows. Thread t moves vector t % 4 of rows t / 4, t / 4 + 32, ...
__device__ __forceinline__ void load_rows(__half (*to)[ROW], const __half* const* from, int k) {
#pragma unroll
    for (int i = 0; i < (ROWS + 31) / 32; ++i) {
        const int row = threadIdx.x / 4 + 32 * i;
        if (row < ROWS) copy16(&to[row][threadIdx.x % 4 * 8], from[i] + k);
    }
    copy_commit();
}

__device__ __forceinline__ void expand_into(__half* to, const Block& block) {
    expand(block, [=](int i, const float* v) {
        ((uint4*)to)[i] = make_uint4(pack_half2(v[0], v[1]), pack_half2(v[2], v[3]), pack_half2(v[4], v[5]),
                                     pack_half2(v[6], v[7]));
    });
}

// sums[m][n]: rows 16 m ..., columns 8 n ... of the warp's 32; one step of 32 along k.
__device__ __forceinline__ void multiply(float (*sums)[4][4], const __half (*x)[ROW], const __half (*w)[ROW]) {
    unsigned b[4][4];
#pragma unroll
    for (int n = 0; n < 4; ++n) load_matrices(b[n], &w[8 * n + lane_id() % 8][lane_id() / 8 * 8]);
#pragma unroll
    for (int m = 0; m < ROWS / 16; ++m) {
        unsigned a[2][4];
#pragma unroll
        for (int half = 0; half < 2; ++half)
            load_matrices(a[half], &x[16 * m + lane_id() % 16][16 * half + lane_id() / 16 * 8]);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            mma(sums[m][n], a[0], b[n][0], b[n][1]);
            mma(sums[m][n], a[1], b[n][2], b[n][3]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
matmul_tile(const u8* __restrict__ weights, const __half* __restrict__ x, const float* __restrict__ scales,
            const float* __restrict__ bias, const int4* __restrict__ tiles, const int* __restrict__ order,
            float* __restrict__ out, int n_out, int k, int n_rows, int n_expert, int share,
            int out_stride) {
    __shared__ __align__(16) __half rows[2][ROWS][ROW], columns[COLUMNS][ROW];
    const Tile tile = this_tile(tiles, order, n_rows, share);
    if (tile.count <= 0) return;
    const int n_blocks = k / STEP, first_column = blockIdx.x * COLUMNS + warp_id() * 32;
    const Planes planes(weights, (long long)n_expert * n_out * n_blocks);
    const int my_column = min(first_column + lane_id(), n_out - 1);
    const long long my_blocks = ((long long)tile.expert * n_out + my_column) * n_blocks;
    __half(*mine)[ROW] = columns + warp_id() * 32;

    const __half* from[(ROWS + 31) / 32];
#pragma unroll
    for (int i = 0; i < (ROWS + 31) / 32; ++i)
        from[i] = x + (long long)tile.x_row(threadIdx.x / 4 + 32 * i) * k + threadIdx.x % 4 * 8;

    float sums[ROWS / 16][4][4] = {};
    Block next = load_block(planes, my_blocks);
    load_rows(rows[0], from, 0);
    for (int b = 0; b < n_blocks; ++b) {
        expand_into(mine[lane_id()], next);
        if (b + 1 < n_blocks) next = load_block(planes, my_blocks + b + 1);
        copy_wait<0>();
        __syncthreads();  // rows b are here, and everyone is done with rows b - 1
        if (b + 1 < n_blocks) load_rows(rows[(b + 1) % 2], from, (b + 1) * STEP);
        multiply(sums, rows[b % 2], mine);
        __syncwarp();
    }

#pragma unroll
    for (int m = 0; m < ROWS / 16; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = 16 * m + fragment_group() + 8 * half;
            if (i >= tile.count) continue;
            const float scale = scales[tile.x_row(i)];
            float* to = out + (long long)tile.pair(i) * out_stride;
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                const int column = first_column + c / 2 * 8 + 2 * fragment_quad() + c % 2;
                if (column < n_out)
                    to[column] = fmaf(sums[m][c / 2][2 * half + c % 2], scale,
                                      bias ? bias[(long long)tile.expert * n_out + column] : 0.0f);
            }
        }
    }
}
