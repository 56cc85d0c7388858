// Numbers as PTX has them: bit patterns of f16, bf16, f32 and f64, and conversions with every rounding.
//
// Rules: f16 and bf16 arithmetic is done in f32 and rounded once more, which is exact for + - * / sqrt (24 >= 2 p + 2);
// fma goes through f64 with round-to-odd, which is exact, too. Subnormals are kept: .ftz is ignored.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace emu {

inline float f32(uint32_t b) { float f; memcpy(&f, &b, 4); return f; }
inline double f64(uint64_t b) { double f; memcpy(&f, &b, 8); return f; }
inline uint32_t bits_of(float f) { uint32_t b; memcpy(&b, &f, 4); return b; }
inline uint64_t bits_of(double f) { uint64_t b; memcpy(&b, &f, 8); return b; }
inline float f16(uint16_t b) { _Float16 h; memcpy(&h, &b, 2); return float(h); }
inline uint16_t f16_bits(float f) { auto h = _Float16(f); uint16_t b; memcpy(&b, &h, 2); return b; }
inline float bf16(uint16_t b) { return f32(uint32_t(b) << 16); }
inline uint16_t bf16_bits(float f) {
  uint32_t u = bits_of(f);
  if ((u & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

// f64 to f32 such that a second rounding to fewer bits gives the correctly rounded result.
inline float round_to_odd(double d) {
  auto f = float(d);
  if (double(f) == d || !(d - d == 0)) return f;
  uint32_t u = bits_of(f);
  if ((double(f) > d) == (d > 0)) --u;  // back to the one nearer zero
  return f32(u | 1);
}

}  // namespace emu
