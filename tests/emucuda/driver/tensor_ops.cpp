// ldmatrix, movmatrix and mma for a whole warp.
//
// Fragment layouts (PTX ISA, "Matrix Fragments for mma"): with g = lane / 4, q = lane % 4 and e elements a register
// (2 halves, 4 bytes, 1 tf32), register r of A holds row g + 8 (r & 1), columns e q + 4 e (r >> 1) on; register r of B
// holds rows e q + 4 e r on of column g; accumulator i holds row g + 8 (i >> 1), column 2 q + (i & 1).
// With m = 8 there is only the upper half: register r of A holds columns e q + 4 e r on.
// Products are exact and summed in f32 in order of k: the device's own order is not specified.
#include <cstring>

#include "../kernel/numeric.h"
#include "block.h"

namespace emu {

static const char* row_address(const Warp& w, int lane) {
  return reinterpret_cast<const char*>(uint64_t(w.slot[lane].in[1]) << 32 | w.slot[lane].in[0]);
}

// Lane i of each group of eight gives the address of row i; lane l receives elements 2 (l % 4) and on of row l / 4.
static void load_matrices(Warp& w) {
  int n = int(w.slot[0].in[2]);
  bool transposed = w.slot[0].in[3];
  for (int m = 0; m < n; ++m) {
    uint16_t matrix[8][8];
    for (int row = 0; row < 8; ++row) memcpy(matrix[row], row_address(w, m * 8 + row), 16);
    for (int lane = 0; lane < 32; ++lane) {
      int i = lane / 4, j = lane % 4 * 2;
      uint32_t low = transposed ? matrix[j][i] : matrix[i][j];
      uint32_t high = transposed ? matrix[j + 1][i] : matrix[i][j + 1];
      w.slot[lane].out[m] = low | high << 16;
    }
  }
}

static void transpose_matrix(Warp& w) {
  uint16_t matrix[8][8];
  for (int lane = 0; lane < 32; ++lane) memcpy(&matrix[lane / 4][lane % 4 * 2], &w.slot[lane].in[0], 4);
  for (int lane = 0; lane < 32; ++lane) {
    int i = lane / 4, j = lane % 4 * 2;
    w.slot[lane].out[0] = uint32_t(matrix[j][i]) | uint32_t(matrix[j + 1][i]) << 16;
  }
}

// ---- mma: fragments are gathered into plain matrices, multiplied, and dealt out again ------------------------------------
struct Half {
  using Value = float;
  static constexpr int kPerRegister = 2;
  static float get(uint32_t bits, int i) { return f16(uint16_t(bits >> 16 * i)); }
};
struct BFloat {
  using Value = float;
  static constexpr int kPerRegister = 2;
  static float get(uint32_t bits, int i) { return bf16(uint16_t(bits >> 16 * i)); }
};
struct TFloat {
  using Value = float;
  static constexpr int kPerRegister = 1;
  static float get(uint32_t bits, int) { return f32(bits & ~0x1fffu); }
};
struct SignedByte {
  using Value = uint32_t;  // wraps, as the accumulator does
  static constexpr int kPerRegister = 4;
  static uint32_t get(uint32_t bits, int i) { return uint32_t(int32_t(int8_t(bits >> 8 * i))); }
};
struct UnsignedByte {
  using Value = uint32_t;
  static constexpr int kPerRegister = 4;
  static uint32_t get(uint32_t bits, int i) { return uint8_t(bits >> 8 * i); }
};

// Rows are vectors by type: the loop vectorizer is off (see build.py).
template <class Value>
struct Operands {
  typedef Value Row __attribute__((vector_size(8 * sizeof(Value))));
  Value a[16][32];
  Row b[32], sum[16];
};

template <class A, class B, class Value>
static int gather(const Warp& w, const MmaShape& shape, Operands<Value>& x) {
  constexpr int e = A::kPerRegister;
  int halves = shape.m / 8, n_b = shape.k / (4 * e), n_a = n_b * halves;
  for (int lane = 0; lane < 32; ++lane) {
    const uint32_t* in = w.slot[lane].in;
    int g = lane / 4, q = lane % 4;
    for (int r = 0; r < n_a; ++r)
      for (int i = 0; i < e; ++i) x.a[g + 8 * (r % halves)][e * q + 4 * e * (r / halves) + i] = A::get(in[r], i);
    for (int r = 0; r < n_b; ++r)
      for (int i = 0; i < e; ++i) x.b[e * q + 4 * e * r + i][g] = B::get(in[n_a + r], i);
  }
  return n_a + n_b;
}

template <class Value>
static void multiply(const MmaShape& shape, Operands<Value>& x) {
  for (int row = 0; row < shape.m; ++row) {
    auto sum = x.sum[row];
    for (int k = 0; k < shape.k; ++k) sum += x.a[row][k] * x.b[k];
    x.sum[row] = sum;
  }
}

// Calls body(slot, i, row, column) for each accumulator i of each lane.
template <class Body>
static void for_accumulators(Warp& w, int m, Body body) {
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < m / 4; ++i) body(w.slot[lane], i, lane / 4 + 8 * (i >> 1), lane % 4 * 2 + (i & 1));
}

template <class A>
static void mma_float(Warp& w, const MmaShape& shape) {
  Operands<float> x;
  int c_at = gather<A, A>(w, shape, x);
  bool half = shape.f16_accumulator;
  for_accumulators(w, shape.m, [&](LaneSlot& slot, int i, int row, int column) {
    x.sum[row][column] = half ? f16(uint16_t(slot.in[c_at + i / 2] >> 16 * (i & 1))) : f32(slot.in[c_at + i]);
  });
  multiply(shape, x);
  for_accumulators(w, shape.m, [&](LaneSlot& slot, int i, int row, int column) {
    float sum = x.sum[row][column];
    if (!half)
      slot.out[i] = bits_of(sum);
    else if (i & 1)
      slot.out[i / 2] |= uint32_t(f16_bits(sum)) << 16;
    else
      slot.out[i / 2] = f16_bits(sum);
  });
}

template <class A, class B>
static void mma_int(Warp& w, const MmaShape& shape) {
  Operands<uint32_t> x;
  int c_at = gather<A, B>(w, shape, x);
  for_accumulators(w, shape.m, [&](LaneSlot& slot, int i, int row, int column) {
    x.sum[row][column] = slot.in[c_at + i];
  });
  multiply(shape, x);
  for_accumulators(w, shape.m, [&](LaneSlot& slot, int i, int row, int column) { slot.out[i] = x.sum[row][column]; });
}

static void multiply_matrices(Warp& w, const MmaShape& shape) {
  switch (shape.a_type * 8 + shape.b_type) {
    case kF16 * 8 + kF16: return mma_float<Half>(w, shape);
    case kBf16 * 8 + kBf16: return mma_float<BFloat>(w, shape);
    case kTf32 * 8 + kTf32: return mma_float<TFloat>(w, shape);
    case kS8 * 8 + kS8: return mma_int<SignedByte, SignedByte>(w, shape);
    case kS8 * 8 + kU8: return mma_int<SignedByte, UnsignedByte>(w, shape);
    case kU8 * 8 + kS8: return mma_int<UnsignedByte, SignedByte>(w, shape);
    case kU8 * 8 + kU8: return mma_int<UnsignedByte, UnsignedByte>(w, shape);
  }
}

void combine_tensor_op(Warp& w, WarpOp op) {
  if (op == kLdMatrix) return load_matrices(w);
  if (op == kMovMatrix) return transpose_matrix(w);
  multiply_matrices(w, w.slot[0].shape);
}

}  // namespace emu
