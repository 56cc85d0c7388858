// gather_cells: the K and V rows of all layers of `cells[i]` into record i; one launch however many cells or layers.
//
// Pool (16-byte vectors): layer l starts at l * layer_vecs; in it K rows [n_cells][k_vecs], then, from v_offset on,
//   V rows [n_cells][v_vecs].
// Records: record i starts at i * n_layer * (k_vecs + v_vecs): layer 0's K row, V row, layer 1's ...
// Grid (n, y) for any y <= n_layer: block (i, y) copies layers y, y + gridDim.y, ... of cell i. Any whole warps.
// Bytes moved: 2 * n * n_layer * 16 * (k_vecs + v_vecs), all coalesced.
#include "common.cuh"

extern "C" __global__ void gather_cells(const uint4* __restrict__ pool, const int* __restrict__ cells,
                                        uint4* __restrict__ records, int n_layer, int k_vecs, int v_vecs,
                                        long long layer_vecs, long long v_offset) {
    const int row_vecs = k_vecs + v_vecs;
    const long long cell = cells[blockIdx.x];
    uint4* record = records + (long long)blockIdx.x * n_layer * row_vecs;
    for (int layer = blockIdx.y; layer < n_layer; layer += gridDim.y) {
        const uint4* k_row = pool + layer * layer_vecs + cell * k_vecs;
        const uint4* v_row = pool + layer * layer_vecs + v_offset + cell * v_vecs;
        for (int i = threadIdx.x; i < row_vecs; i += blockDim.x)
            record[layer * row_vecs + i] = i < k_vecs ? k_row[i] : v_row[i - k_vecs];
    }
}
