// top_k_merge: the k largest logits of a row from its slices' (top_k_part.cu), and the logarithm of the sum of exp.
// ids i32, values f32 [n_rows][k]: by descending logit, of equal ones the lower id first; logsumexp f32 [n_rows]. k at
// most n_vocab. Grid (n_rows), 256 threads: a thread to one of at most 256 slices (a vocabulary of 2^20). Bytes moved
// per row: 8 (2 n_parts + k) read, 8 k written.
#include "top_k.cuh"

extern "C" __global__ void __launch_bounds__(256)
top_k_merge(const Key* __restrict__ candidates, const float2* __restrict__ stats, int* __restrict__ ids,
            float* __restrict__ values, float* __restrict__ logsumexp, int n_parts, int k) {
    const bool has_part = threadIdx.x < n_parts;
    const long long part = (long long)blockIdx.x * n_parts + threadIdx.x;
    const float2 own = has_part ? stats[part] : make_float2(LOWEST, 0.0f);
    const float top = block_max(own.x), sum = block_sum(own.y * expf(own.x - top));
    if (threadIdx.x == 0) logsumexp[blockIdx.x] = top + logf(sum);
    const Key* list = candidates + part * k;
    int taken = 0;
    Key head = has_part ? list[0] : 0;
    for (int j = 0; j < k; ++j) {
        const Key best = block_max_key(head);
        if (threadIdx.x == 0) {
            ids[(long long)blockIdx.x * k + j] = key_id(best);
            values[(long long)blockIdx.x * k + j] = key_logit(best);
        }
        if (best == 0 || best != head) continue;
        ++taken;
        head = taken < k ? list[taken] : 0;
    }
}
