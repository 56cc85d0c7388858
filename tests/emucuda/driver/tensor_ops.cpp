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

static int elements_per_register(uint32_t type) { return type == kTf32 ? 1 : type >= kS8 ? 4 : 2; }

static float float_element(uint32_t type, uint32_t bits, int i) {
  if (type == kTf32) return f32(bits & ~0x1fffu);
  auto half = uint16_t(bits >> 16 * i);
  return type == kF16 ? f16(half) : bf16(half);
}
static int int_element(uint32_t type, uint32_t bits, int i) {
  auto byte = uint8_t(bits >> 8 * i);
  return type == kS8 ? int(int8_t(byte)) : int(byte);
}

template <class Element, class Get>
static void unpack(const Warp& w, const MmaShape& shape, Element (&a)[16][32], Element (&b)[8][32], Get get) {
  int e = elements_per_register(shape.a_type), halves = shape.m / 8;
  int n_b = shape.k / (4 * e), n_a = n_b * halves;
  for (int lane = 0; lane < 32; ++lane) {
    const uint32_t* in = w.slot[lane].in;
    int g = lane / 4, q = lane % 4;
    for (int r = 0; r < n_a; ++r)
      for (int i = 0; i < e; ++i)
        a[g + 8 * (r % halves)][e * q + 4 * e * (r / halves) + i] = get(shape.a_type, in[r], i);
    for (int r = 0; r < n_b; ++r)
      for (int i = 0; i < e; ++i) b[g][e * q + 4 * e * r + i] = get(shape.b_type, in[n_a + r], i);
  }
}

// Calls put(lane, i, row, column) for each accumulator of each lane.
template <class Body>
static void for_accumulators(int m, Body body) {
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < m / 4; ++i) body(lane, i, lane / 4 + 8 * (i >> 1), lane % 4 * 2 + (i & 1));
}

static void mma_float(Warp& w, const MmaShape& shape, int c_at) {
  float a[16][32], b[8][32];
  unpack(w, shape, a, b, float_element);
  for_accumulators(shape.m, [&](int lane, int i, int row, int column) {
    LaneSlot& slot = w.slot[lane];
    float sum = shape.f16_accumulator ? f16(uint16_t(slot.in[c_at + i / 2] >> 16 * (i & 1))) : f32(slot.in[c_at + i]);
    for (int k = 0; k < shape.k; ++k) sum += a[row][k] * b[column][k];
    if (!shape.f16_accumulator) {
      slot.out[i] = bits_of(sum);
    } else {
      uint32_t half = f16_bits(sum);
      slot.out[i / 2] = i & 1 ? slot.out[i / 2] | half << 16 : half;
    }
  });
}

static void mma_int(Warp& w, const MmaShape& shape, int c_at) {
  int a[16][32], b[8][32];
  unpack(w, shape, a, b, int_element);
  for_accumulators(shape.m, [&](int lane, int i, int row, int column) {
    auto sum = w.slot[lane].in[c_at + i];
    for (int k = 0; k < shape.k; ++k) sum += uint32_t(a[row][k] * b[column][k]);
    w.slot[lane].out[i] = sum;
  });
}

void combine_tensor_op(Warp& w, WarpOp op) {
  if (op == kLdMatrix) return load_matrices(w);
  if (op == kMovMatrix) return transpose_matrix(w);
  const MmaShape shape = w.slot[0].shape;
  int n_b = shape.k / (4 * elements_per_register(shape.a_type));
  int c_at = n_b * (shape.m / 8) + n_b;
  if (shape.a_type >= kS8)
    mma_int(w, shape, c_at);
  else
    mma_float(w, shape, c_at);
}

}  // namespace emu
