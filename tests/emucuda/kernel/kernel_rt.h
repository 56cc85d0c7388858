// The helpers that translated kernels are written in: memory access, integer instructions, conversions, warp operations.
// Names follow the PTX instruction they carry out. Everything here is inlined into each kernel object.
#pragma once
#include "kernel_abi.h"
#include "numeric.h"

#define CHECK_GLOBAL(address, bytes, access, site) \
  do { if (__builtin_expect(checked, 0)) t->rt->check_global(t, address, bytes, access, site); } while (0)
#define CHECK_SHARED(address, bytes, access, site) \
  do { if (__builtin_expect(checked, 0)) t->rt->check_shared(t, address, bytes, access, site); } while (0)
// Vector accesses fault on the device when misaligned: cheap enough to test always.
#define CHECK_ALIGNED(address, bytes, site) \
  do { if (__builtin_expect((uintptr_t)(address) % (bytes), 0)) t->rt->misaligned(t, address, bytes, site); } while (0)

namespace emu {

template <class T> struct Signed;
template <> struct Signed<uint8_t> { using type = int8_t; };
template <> struct Signed<uint16_t> { using type = int16_t; };
template <> struct Signed<uint32_t> { using type = int32_t; };
template <> struct Signed<uint64_t> { using type = int64_t; };

// ---- memory ---------------------------------------------------------------------------------------------------------
template <class T> inline T load(const char* a) { T v; memcpy(&v, a, sizeof v); return v; }
template <class T> inline void store(char* a, T v) { memcpy(a, &v, sizeof v); }

// Shared addresses are offsets from a base that is not zero, so that null stays invalid.
constexpr uint32_t kSharedBase = 1024;
inline char* shared_pointer(Thread* t, uint32_t offset) { return t->shared + (int32_t)(offset - kSharedBase); }
inline uint32_t shared_offset(Thread* t, uint64_t p) { return (uint32_t)(p - (uint64_t)t->shared) + kSharedBase; }
inline bool is_shared(Thread* t, uint64_t p) { return p - (uint64_t)t->shared < t->shared_bytes; }

template <class T, class F> inline T atomic_update(char* address, F change) {
  T* p = (T*)address;
  T old = __atomic_load_n(p, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(p, &old, (T)change(old), false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) {}
  return old;
}

inline void cp_async(Thread* t, bool checked, char* to, const char* from, int bytes, int source_bytes, int site) {
  if (source_bytes > bytes) source_bytes = bytes;
  CHECK_ALIGNED(to, bytes, site);
  if (checked) return t->rt->cp_async(t, to, from, bytes, source_bytes, site);
  memcpy(to, from, source_bytes);
  memset(to + source_bytes, 0, bytes - source_bytes);
}

// ---- integers -------------------------------------------------------------------------------------------------------
template <class T> inline T lesser(T a, T b) { return b < a ? b : a; }
template <class T> inline T greater(T a, T b) { return a < b ? b : a; }
// Division never faults on the device.
template <class T> inline T div_int(T a, T b) { return b == 0 ? (T)-1 : b == (T)-1 && (T)-1 < 0 ? (T)(0 - (uint64_t)a) : a / b; }
template <class T> inline T rem_int(T a, T b) { return b == 0 ? a : b == (T)-1 && (T)-1 < 0 ? 0 : a % b; }
inline uint32_t add_sat(int32_t a, int32_t b, int sign) {
  int64_t r = (int64_t)a + sign * (int64_t)b;
  return (uint32_t)(int32_t)lesser<int64_t>(greater<int64_t>(r, INT32_MIN), INT32_MAX);
}
template <class T> inline T shl(T a, uint32_t n) { return n >= sizeof(T) * 8 ? 0 : (T)(a << n); }
template <class T> inline T shr(T a, uint32_t n) { return n >= sizeof(T) * 8 ? (T)(a < 0 ? -1 : 0) : (T)(a >> n); }
inline uint32_t shf_l(uint32_t low, uint32_t high, uint32_t n) {
  return (uint32_t)((((uint64_t)high << 32 | low) << n) >> 32);
}
inline uint32_t shf_r(uint32_t low, uint32_t high, uint32_t n) { return (uint32_t)(((uint64_t)high << 32 | low) >> n); }

template <class T> inline T bfe(T v, uint32_t position, uint32_t length) {
  const uint32_t width = sizeof(T) * 8;
  position &= 255;
  length &= 255;
  if (!length) return 0;
  if (position >= width) return v < 0 ? (T)-1 : 0;
  T x = v >> position;  // keeps the sign, as the field is extended from the top where it runs out of bits
  return length >= width ? x : (T)((T)(x << (width - length)) >> (width - length));
}
template <class T> inline T bfi(T from, T into, uint32_t position, uint32_t length) {
  const uint32_t width = sizeof(T) * 8;
  position &= 255;
  length &= 255;
  if (!length || position >= width) return into;
  T mask = (T)((length >= width ? ~(T)0 : ((T)1 << length) - 1) << position);
  return (into & ~mask) | ((from << position) & mask);
}
template <class T> inline uint32_t bfind(T v, bool shift_amount) {  // T signed: finds the highest bit unlike the sign
  using U = uint64_t;
  U u = v < 0 ? ~(U)(int64_t)v : (U)v;
  if (sizeof(T) < 8) u &= ((U)1 << (sizeof(T) * 8)) - 1;
  if (!u) return ~0u;
  uint32_t highest = 63 - __builtin_clzll(u);
  return shift_amount ? sizeof(T) * 8 - 1 - highest : highest;
}
template <class T> inline T brev(T v) {
  T r = 0;
  for (unsigned i = 0; i < sizeof(T) * 8; ++i) r = (T)(r << 1 | (v >> i & 1));
  return r;
}
template <class T> inline uint32_t clz(T v) { return v ? __builtin_clzll(v) - (64 - sizeof(T) * 8) : sizeof(T) * 8; }
inline uint32_t fns(uint32_t mask, uint32_t base, int32_t offset) {
  if (offset == 0) return mask >> (base & 31) & 1 ? base : ~0u;
  int step = offset > 0 ? 1 : -1, left = offset > 0 ? offset : -offset;
  for (int i = (int)base; i >= 0 && i < 32; i += step)
    if (mask >> i & 1 && --left == 0) return (uint32_t)i;
  return ~0u;
}
inline uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
  uint64_t bytes = (uint64_t)b << 32 | a;
  uint32_t r = 0;
  for (int i = 0; i < 4; ++i) {
    uint32_t pick = selector >> 4 * i & 15;
    auto byte = (uint8_t)(bytes >> 8 * (pick & 7));
    if (pick & 8) byte = (int8_t)byte >> 7;
    r |= (uint32_t)byte << 8 * i;
  }
  return r;
}
// prmt's modes as selectors of the plain form, for each value of the low two bits of the control
inline uint32_t prmt_selector(int mode, uint32_t control) {
  static const uint16_t kSelectors[6][4] = {
      {0x3210, 0x4321, 0x5432, 0x6543},  // f4e
      {0x5670, 0x6701, 0x7012, 0x0123},  // b4e
      {0x0000, 0x1111, 0x2222, 0x3333},  // rc8
      {0x3210, 0x3211, 0x3222, 0x3333},  // ecl
      {0x0000, 0x1110, 0x2210, 0x3210},  // ecr
      {0x1010, 0x3232, 0x1010, 0x3232},  // rc16
  };
  return kSelectors[mode][control & 3];
}
// The table's bit 4 a + 2 b + c is the result for that combination: a sum of minterms, folded for a constant table.
inline __attribute__((always_inline)) uint32_t lop3(uint32_t a, uint32_t b, uint32_t c, uint32_t table) {
  uint32_t r = 0;
  if (table & 1) r |= ~a & ~b & ~c;
  if (table & 2) r |= ~a & ~b & c;
  if (table & 4) r |= ~a & b & ~c;
  if (table & 8) r |= ~a & b & c;
  if (table & 16) r |= a & ~b & ~c;
  if (table & 32) r |= a & ~b & c;
  if (table & 64) r |= a & b & ~c;
  if (table & 128) r |= a & b & c;
  return r;
}
template <class A, class B> inline uint32_t dp4a(uint32_t a, uint32_t b, uint32_t c) {
  for (int i = 0; i < 32; i += 8) c += (uint32_t)((int)(A)(a >> i) * (int)(B)(b >> i));
  return c;
}
template <class A, class B> inline uint32_t dp2a(uint32_t a, uint32_t b, uint32_t c, bool high) {  // A 16 bits, B 8
  if (high) b >>= 16;
  return c + (uint32_t)((int)(A)a * (int)(B)b) + (uint32_t)((int)(A)(a >> 16) * (int)(B)(b >> 8));
}

// ---- floats ---------------------------------------------------------------------------------------------------------
inline float fma_half(float a, float b, float c) { return round_to_odd((double)a * b + c); }
// PTX orders -0 below +0.
template <class T> inline T max_num(T a, T b) { return a == b ? (std::signbit(a) ? b : a) : std::fmax(a, b); }
template <class T> inline T min_num(T a, T b) { return a == b ? (std::signbit(a) ? a : b) : std::fmin(a, b); }
template <class T> inline T max_nan(T a, T b) { return a != a ? a : b != b ? b : max_num(a, b); }
template <class T> inline T min_nan(T a, T b) { return a != a ? a : b != b ? b : min_num(a, b); }
template <class T> inline T saturate(T v) { return !(v > 0) ? 0 : v > 1 ? 1 : v; }

// ---- conversions ----------------------------------------------------------------------------------------------------
enum Rounding { kNearest, kZero, kDown, kUp };

template <class T> inline T to_int(double v) {  // v is integral, or NaN
  if (v != v) return sizeof(T) < 8 || (T)-1 > 0 ? 0 : std::numeric_limits<T>::min();
  double low = (double)std::numeric_limits<T>::min(), high = (double)std::numeric_limits<T>::max();
  return v <= low ? std::numeric_limits<T>::min() : v >= high ? std::numeric_limits<T>::max() : (T)v;
}
template <class To, class From> inline To saturate_int(From v) {
  __int128 x = v, low = std::numeric_limits<To>::min(), high = std::numeric_limits<To>::max();
  return (To)(x < low ? low : x > high ? high : x);
}

// Moves a nearest result to the neighbour that the rounding asks for. `Next` steps the bits of a narrower format.
template <class Bits> inline Bits toward(Bits nearest, double value, double exact, Rounding rounding) {
  const Bits sign = (Bits)1 << (sizeof(Bits) * 8 - 1);
  if (value == exact || exact != exact) return nearest;
  bool too_big = value > exact;
  bool want_smaller = rounding == kDown || (rounding == kZero && exact > 0);
  if (too_big != want_smaller) return nearest;
  if ((Bits)(nearest << 1) == 0) return too_big ? (Bits)(sign | 1) : (Bits)1;
  bool grows = too_big == (bool)(nearest & sign);  // the magnitude
  return grows ? nearest + 1 : nearest - 1;
}
inline uint32_t f32_rounded(double v, Rounding r) {
  auto f = (float)v;
  return r == kNearest ? bits_of(f) : toward<uint32_t>(bits_of(f), f, v, r);
}
inline uint16_t f16_rounded(double v, Rounding r) {
  uint16_t b = f16_bits(round_to_odd(v));
  return r == kNearest ? b : toward<uint16_t>(b, f16(b), v, r);
}
inline uint16_t bf16_rounded(double v, Rounding r) {
  uint16_t b = bf16_bits(round_to_odd(v));
  return r == kNearest ? b : toward<uint16_t>(b, bf16(b), v, r);
}
inline uint32_t tf32_bits(float v) {  // nearest, ties away
  uint32_t u = bits_of(v);
  return v != v ? 0x7fffffffu : (u & 0x7f800000) == 0x7f800000 ? u : (u + 0x1000) & ~0x1fffu;
}
// f32 arithmetic with a directed rounding: an exact sum + error in f64, where the error is below the sum's last place.
struct Exact { double sum, error; };
inline Exact exact_sum(double a, double b) {  // two-sum
  double s = a + b, part = s - a;
  return {s, (a - (s - part)) + (b - part)};
}
inline Exact exact_add(float a, float b) { return exact_sum(a, b); }
inline Exact exact_sub(float a, float b) { return exact_sum(a, -b); }
inline Exact exact_mul(float a, float b) { return {(double)a * b, 0}; }
inline Exact exact_fma(float a, float b, float c) { return exact_sum((double)a * b, c); }
inline Exact exact_div(float a, float b) {
  double q = (double)a / b;
  return {q, std::fma(-q, (double)b, (double)a) / b};
}
inline uint32_t f32_directed(Exact x, Rounding r) {
  auto f = (float)x.sum;
  if (!(x.sum - x.sum == 0)) return bits_of(f);
  double value = x.sum;
  if (f == x.sum && std::fabs(x.error) > 0) value = std::nextafter(x.sum, x.error > 0 ? INFINITY : -INFINITY);
  return toward<uint32_t>(bits_of(f), f, value, r);
}
// A 64-bit integer as f64 rounded to odd, so that one more rounding to fewer bits is right; and rounded in a direction.
template <class T> inline double odd_double(T x) {
  double d = (double)x;
  __int128 rest = (__int128)x - (__int128)d;
  if (rest == 0) return d;
  uint64_t bits = bits_of(d);
  if ((rest < 0) == (x > 0)) --bits;  // back to the one nearer zero
  return f64(bits | 1);
}
template <class T> inline uint64_t f64_from_int(T x, Rounding r) {
  double d = (double)x;
  __int128 rest = (__int128)x - (__int128)d;
  double exact = rest == 0 ? d : std::nextafter(d, rest > 0 ? INFINITY : -INFINITY);
  return r == kNearest ? bits_of(d) : toward<uint64_t>(bits_of(d), d, exact, r);
}
inline double int_rounded(double v, char mode) {
  return mode == 'i' ? std::nearbyint(v) : mode == 'z' ? std::trunc(v) : mode == 'm' ? std::floor(v) : std::ceil(v);
}

// ---- warp operations --------------------------------------------------------------------------------------------------
inline uint32_t shfl(Thread* t, WarpOp op, uint32_t a, uint32_t b, uint32_t c, uint32_t mask, bool* in_range, int site) {
  LaneSlot* s = t->slot;
  s->in[0] = a, s->in[1] = b, s->in[2] = c;
  t->rt->warp(t, op, mask, site);
  *in_range = s->out[1];
  return s->out[0];
}
inline uint32_t vote(Thread* t, bool predicate, uint32_t mask, uint32_t* lanes, int site) {
  t->slot->in[0] = predicate;
  t->rt->warp(t, kVote, mask, site);
  *lanes = t->slot->out[1];
  return t->slot->out[0];
}
inline uint32_t match(Thread* t, WarpOp op, uint64_t value, uint32_t mask, bool* all, int site) {
  t->slot->in[0] = (uint32_t)value, t->slot->in[1] = (uint32_t)(value >> 32);
  t->rt->warp(t, op, mask, site);
  *all = t->slot->out[1];
  return t->slot->out[0];
}
inline uint32_t redux(Thread* t, WarpOp op, uint32_t value, uint32_t mask, int site) {
  t->slot->in[0] = value;
  t->rt->warp(t, op, mask, site);
  return t->slot->out[0];
}
inline const uint32_t* ldmatrix(Thread* t, const char* row, uint32_t n, bool transposed, int site) {
  LaneSlot* s = t->slot;
  s->in[0] = (uint32_t)(uint64_t)row, s->in[1] = (uint32_t)((uint64_t)row >> 32), s->in[2] = n, s->in[3] = transposed;
  t->rt->warp(t, kLdMatrix, ~0u, site);
  return s->out;
}
inline const uint32_t* mma(Thread* t, MmaShape shape, int site) {  // operands are in slot->in already
  t->slot->shape = shape;
  t->rt->warp(t, kMma, ~0u, site);
  return t->slot->out;
}

}  // namespace emu
