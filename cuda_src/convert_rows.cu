// convert_rows: f32 rows [rows][k] into what a matrix product reads: -DOUT=1 int8 blocks, 2 scaled halves (emit.cuh).
//
// Grid (rows), whole warps. k a multiple of 32. Bytes moved: 4 k read, 1.25 k (Q8) or 2 k (F16) written per row.
#include "emit.cuh"

extern "C" __global__ void convert_rows(const float* __restrict__ x, int k, void* out, void* extra) {
    const float4* row = (const float4*)(x + (long long)blockIdx.x * k);
    emit_row<OUT>([=](int i) { return row[i]; }, k, row_out(out, extra), blockIdx.x);
}
