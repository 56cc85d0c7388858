// attention_combine: joins the partial results of rows that attention_decode cut into more than one part.
//
// Arguments as there; n_splits as its grid's z. Grid (n_rows, n_head), D threads: a thread to a dim.
// Rows in one part, and padding, are done already. Bytes moved: 4 (D + 2) a part, 4 D written.
#include "attention.cuh"

extern "C" __global__ void attention_combine(const float* __restrict__ partial, const int* __restrict__ positions,
                                             const float* __restrict__ sinks, float* __restrict__ out, int n_splits,
                                             int window) {
    const int row = blockIdx.x, head = blockIdx.y, n_head = gridDim.y, dim = threadIdx.x, position = positions[row];
    const int n_seen = position + 1 - first_seen(position, window);
    const int part = part_cells(n_seen, n_splits);
    if (position < 0 || n_seen <= part) return;
    const int n_parts = (n_seen + part - 1) / part;
    const float* mine = partial + ((long long)row * n_head + head) * n_splits * (D + 2);
    float maximum = sinks ? sinks[head] * LOG2E : LOWEST;
    float weight = sinks ? 1.0f : 0.0f, sum = 0.0f;
    for (int s = 0; s < n_parts; ++s) {
        const float* p = mine + s * (D + 2);
        const float top = fmaxf(maximum, p[D]), keep = exp2f(maximum - top), more = exp2f(p[D] - top);
        maximum = top;
        weight = weight * keep + p[D + 1] * more;
        sum = sum * keep + p[dim] * more;
    }
    out[((long long)row * n_head + head) * D + dim] = sum / weight;
}
