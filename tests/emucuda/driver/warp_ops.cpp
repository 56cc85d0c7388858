// The operations that lanes of a warp perform together, computed once all have arrived, and the table through which
// translated code reaches the runner.
#include <algorithm>
#include <cstring>

#include "api.h"
#include "block.h"

namespace emu {

template <class Body>
static void for_lanes(uint32_t lanes, Body body) {
  for (; lanes; lanes &= lanes - 1) body(__builtin_ctz(lanes));
}

// PTX ISA, shfl: c holds the clamp (bits 0-4) and the segment mask (bits 8-12).
static int shuffle_source(WarpOp op, int lane, uint32_t b, uint32_t c, bool& in_range) {
  int segment = int(c >> 8 & 31), clamp = int(c & 31), offset = int(b & 31);
  int highest = (lane & segment) | (clamp & ~segment), lowest = lane & segment;
  int source = op == kShflUp     ? lane - offset
               : op == kShflDown ? lane + offset
               : op == kShflXor  ? lane ^ offset
                                 : lowest | (offset & ~segment);
  in_range = op == kShflUp ? source >= highest : source <= highest;
  return in_range ? source : lane;
}

static uint32_t reduce(WarpOp op, uint32_t a, uint32_t b) {
  switch (op) {
    case kReduxAdd: return a + b;
    case kReduxMin: return std::min(a, b);
    case kReduxMax: return std::max(a, b);
    case kReduxMinS: return uint32_t(std::min(int32_t(a), int32_t(b)));
    case kReduxMaxS: return uint32_t(std::max(int32_t(a), int32_t(b)));
    case kReduxAnd: return a & b;
    case kReduxOr: return a | b;
    default: return a ^ b;
  }
}

static uint64_t match_value(const LaneSlot& s) { return uint64_t(s.in[1]) << 32 | s.in[0]; }

void BlockRunner::combine(Warp& w, WarpOp op, uint32_t lanes, const Fiber& f) {
  auto* slot = w.slot;
  switch (op) {
    case kShflUp: case kShflDown: case kShflXor: case kShflIdx:
      for_lanes(lanes, [&](int lane) {
        bool in_range;
        int source = shuffle_source(op, lane, slot[lane].in[1], slot[lane].in[2], in_range);
        if (!(lanes >> source & 1))
          note(fibers_[f.linear / 32 * 32 + uint32_t(lane)], "shuffle-lane",
               "shuffle reads lane " + std::to_string(source) + ", which does not take part", w.site[lane]);
        slot[lane].out[0] = slot[source].in[0];
        slot[lane].out[1] = in_range;
      });
      break;
    case kVote: {
      uint32_t ballot = 0;
      for_lanes(lanes, [&](int lane) { ballot |= uint32_t(slot[lane].in[0] != 0) << lane; });
      for_lanes(lanes, [&](int lane) { slot[lane].out[0] = ballot, slot[lane].out[1] = lanes; });
      break;
    }
    case kMatchAny: case kMatchAll:
      for_lanes(lanes, [&](int lane) {
        uint32_t same = 0;
        for_lanes(lanes, [&](int other) {
          same |= uint32_t(match_value(slot[lane]) == match_value(slot[other])) << other;
        });
        slot[lane].out[1] = same == lanes;
        slot[lane].out[0] = op == kMatchAny || same == lanes ? same : 0;
      });
      break;
    case kSyncWarp: ++w.sync_phase; break;
    case kLdMatrix: case kMovMatrix: case kMma:
      if (lanes != ~0u) fail(f, CUDA_ERROR_LAUNCH_FAILED, "a matrix operation needs all 32 lanes", w.site[f.lane]);
      combine_tensor_op(w, op);
      break;
    default: {
      bool first = true;
      uint32_t result = 0;
      for_lanes(lanes, [&](int lane) {
        result = first ? slot[lane].in[0] : reduce(op, result, slot[lane].in[0]);
        first = false;
      });
      for_lanes(lanes, [&](int lane) { slot[lane].out[0] = result; });
    }
  }
}

// ---- the table ----------------------------------------------------------------------------------------------------------
static Fiber& fiber(Thread* t) { return *static_cast<Fiber*>(t); }

static void rt_barrier(Thread* t, int id, int count, int site) {
  fiber(t).runner->barrier(fiber(t), id, count, site, true, false);
}
static uint32_t rt_barrier_reduce(Thread* t, int id, int count, bool predicate, int site) {
  fiber(t).runner->barrier(fiber(t), id, count, site, true, predicate);
  return fiber(t).runner->barrier_result(id);
}
static void rt_barrier_arrive(Thread* t, int id, int count, int site) {
  fiber(t).runner->barrier(fiber(t), id, count, site, false, false);
}
static void rt_warp(Thread* t, WarpOp op, uint32_t mask, int site) {
  fiber(t).runner->warp_operation(fiber(t), op, mask, site);
}
static void rt_yield(Thread* t, int site) { fiber(t).runner->yield(fiber(t), site); }
static void rt_check_global(Thread* t, const void* a, int bytes, Access access, int site) {
  fiber(t).runner->check_global(fiber(t), static_cast<const char*>(a), bytes, access, site);
}
static void rt_check_shared(Thread* t, const void* a, int bytes, Access access, int site) {
  fiber(t).runner->check_shared(fiber(t), static_cast<const char*>(a), bytes, access, site);
}
static void rt_cp_async(Thread* t, char* to, const char* from, int bytes, int source_bytes, int site) {
  fiber(t).runner->cp_async(fiber(t), {to, from, bytes, source_bytes, site});
}
static void rt_cp_async_commit(Thread* t) { fiber(t).copies.emplace_back(); }
static void rt_cp_async_wait(Thread* t, int left) { fiber(t).runner->cp_async_wait(fiber(t), left); }
static void rt_trap(Thread* t, const char* why, int site) {
  bool assertion = !strncmp(why, "assert", 6);
  fiber(t).runner->fail(fiber(t), assertion ? CUDA_ERROR_ASSERT : CUDA_ERROR_LAUNCH_FAILED, why, site);
}
static void rt_misaligned(Thread* t, const void*, int bytes, int site) {
  fiber(t).runner->fail(fiber(t), CUDA_ERROR_MISALIGNED_ADDRESS,
                        "misaligned access of " + std::to_string(bytes) + " bytes", site);
}
const Runtime kRuntime = {rt_barrier,      rt_barrier_reduce, rt_barrier_arrive,  rt_warp,          rt_yield,
                          rt_check_global, rt_check_shared,   rt_cp_async,        rt_cp_async_commit,
                          rt_cp_async_wait, rt_trap,          rt_misaligned,      print_formatted};

}  // namespace emu
