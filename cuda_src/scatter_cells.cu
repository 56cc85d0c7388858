// scatter_cells: record i into the K and V rows of all layers of `cells[i]`: the mirror of gather_cells.
//
// Layouts, grid and bytes moved as in gather_cells.cu. The cells are distinct: two records never meet in one.
#include "common.cuh"

extern "C" __global__ void scatter_cells(uint4* __restrict__ pool, const int* __restrict__ cells,
                                         const uint4* __restrict__ records, int n_layer, int k_vecs, int v_vecs,
                                         long long layer_vecs, long long v_offset) {
    const int row_vecs = k_vecs + v_vecs;
    const long long cell = cells[blockIdx.x];
    const uint4* record = records + (long long)blockIdx.x * n_layer * row_vecs;
    for (int layer = blockIdx.y; layer < n_layer; layer += gridDim.y) {
        uint4* k_row = pool + layer * layer_vecs + cell * k_vecs;
        uint4* v_row = pool + layer * layer_vecs + v_offset + cell * v_vecs;
        for (int i = threadIdx.x; i < row_vecs; i += blockDim.x) {
            const uint4 bytes = record[layer * row_vecs + i];
            if (i < k_vecs) k_row[i] = bytes;
            else v_row[i - k_vecs] = bytes;
        }
    }
}
