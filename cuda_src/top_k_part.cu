// top_k_part: of each slice of 4096 logits of a row, the k largest (as keys, top_k.cuh) and the softmax's parts.
//
// logits f32 [n_rows][n_vocab]; soft-capped in place where softcap > 0.
// candidates Key [n_rows][n_parts][k], descending, 0 where a slice has fewer. stats float2 [n_rows][n_parts]: the
// slice's maximum, and the sum of exp(logit - maximum).
// Grid (n_parts = ceil(n_vocab / 4096), n_rows), 256 threads. Takes the largest k times: a thread searches its own 16
// keys again only when one was taken. Bytes moved: the logits once (twice with a soft cap), 8 k a slice.
#include "top_k.cuh"

constexpr int THREADS = 256;

__device__ __forceinline__ Key my_best(const Key* keys) {
    Key best = 0;
    for (int i = threadIdx.x; i < SLICE; i += THREADS) best = keys[i] > best ? keys[i] : best;
    return best;
}

// A slice's keys into shared memory; returns the block's maximum.
__device__ __forceinline__ float load_keys(Key* keys, float* __restrict__ row, int first, int n_vocab, float softcap) {
    float top = LOWEST;
    for (int i = threadIdx.x; i < SLICE; i += THREADS) {
        const int id = first + i;
        keys[i] = 0;
        if (id >= n_vocab) continue;
        float logit = row[id];
        if (softcap > 0.0f) row[id] = logit = softcap * tanhf(logit / softcap);
        keys[i] = key_of(logit, id);
        top = fmaxf(top, logit);
    }
    return block_max(top);
}

extern "C" __global__ void __launch_bounds__(THREADS)
top_k_part(float* __restrict__ logits, Key* __restrict__ candidates, float2* __restrict__ stats, int n_vocab, int k,
           float softcap) {
    __shared__ Key keys[SLICE];
    const long long part = (long long)blockIdx.y * gridDim.x + blockIdx.x;
    const float top = load_keys(keys, logits + (long long)blockIdx.y * n_vocab, blockIdx.x * SLICE, n_vocab, softcap);
    float sum = 0.0f;
    for (int i = threadIdx.x; i < SLICE; i += THREADS)
        if (keys[i]) sum += expf(key_logit(keys[i]) - top);
    sum = block_sum(sum);
    if (threadIdx.x == 0) stats[part] = make_float2(top, sum);
    Key mine = my_best(keys);
    for (int j = 0; j < k; ++j) {
        const Key best = block_max_key(mine);
        if (threadIdx.x == 0) candidates[part * k + j] = best;
        if (best == 0 || best != mine) continue;
        keys[key_id(best) - blockIdx.x * SLICE] = 0;
        mine = my_best(keys);
    }
}
