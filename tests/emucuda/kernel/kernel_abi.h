// What the emulated driver and a translated kernel know of each other.
//
// A translated kernel is a shared object that exports one `emu_kernel`. Its entry function is called once per CUDA
// thread, each on a stack of its own (a fiber), with the thread's state and the packed parameters. Whatever needs
// other threads (barriers, warp operations) or the checker goes back to the driver through the `Runtime` table, so a
// kernel object has no undefined symbols.
#pragma once
#include <cstddef>
#include <cstdint>

namespace emu {

struct Dim { uint32_t x, y, z; };

// An access as the checker sees it.
enum Access : int { kRead = 0, kWrite = 1, kAtomic = 2 };

// Operations that lanes of a warp perform together. Each lane leaves its inputs in its slot; the last lane to arrive
// computes the results of all.
enum WarpOp : int {
  kShflUp, kShflDown, kShflXor, kShflIdx,  // in: value, b, c                  out: value, in-range
  kVote,                                   // in: predicate                    out: ballot, participants
  kMatchAny, kMatchAll,                    // in: value low, high              out: mask, all-equal
  kReduxAdd, kReduxMin, kReduxMax, kReduxMinS, kReduxMaxS, kReduxAnd, kReduxOr, kReduxXor,  // in: value  out: value
  kSyncWarp,                               // orders memory between the lanes
  kLdMatrix, kMovMatrix,                   // in: address low, high, count, transposed (kMovMatrix: value)   out: 1-4
  kMma,                                    // in: MmaShape, A, B, C            out: D
};

// Element types of mma operands; accumulators are f32, s32 or (kF16Acc) packed f16.
enum MmaType : uint32_t { kF16 = 0, kBf16 = 1, kTf32 = 2, kS8 = 3, kU8 = 4 };
struct MmaShape { uint8_t m, k, a_type, b_type, f16_accumulator; };

struct LaneSlot {
  uint32_t in[12];
  uint32_t out[4];
  MmaShape shape;
};

struct Runtime;

// The part of a thread's state that translated code reads.
struct Thread {
  Dim tid, ntid, ctaid, nctaid;
  uint32_t lane, linear;
  bool checked;             // whether accesses are checked; constant during a launch
  char* shared;             // the block's shared memory: statically sized part first
  uint32_t shared_bytes;
  char* const* globals;     // addresses of the kernel's module-scope variables
  LaneSlot* slot;
  const Runtime* rt;
};

struct Runtime {
  void (*barrier)(Thread*, int id, int count, int site);
  uint32_t (*barrier_reduce)(Thread*, int id, int count, bool predicate, int site);  // number of true predicates
  void (*barrier_arrive)(Thread*, int id, int count, int site);
  void (*warp)(Thread*, WarpOp, uint32_t mask, int site);
  void (*yield)(Thread*, int site);  // of a load or a sleep that may wait for another thread
  void (*check_global)(Thread*, const void* address, int bytes, Access, int site);
  void (*check_shared)(Thread*, const void* address, int bytes, Access, int site);
  void (*cp_async)(Thread*, char* to, const char* from, int bytes, int source_bytes, int site);
  void (*cp_async_commit)(Thread*);
  void (*cp_async_wait)(Thread*, int groups_left);
  void (*trap)(Thread*, const char* why, int site);        // does not return
  void (*misaligned)(Thread*, const void* address, int bytes, int site);  // does not return
  void (*print)(Thread*, const char* format, const char* arguments);
};

struct GlobalVariable {
  const char* name;
  uint32_t bytes, align;
  const unsigned char* initial;  // null: zeros
};

struct Kernel {
  const char* name;
  void (*entry)(Thread*, char* parameters);
  int n_parameters;
  const int* parameter_bytes;
  const int* parameter_offset;
  int static_shared_bytes;
  int max_threads;               // __launch_bounds__, or 1024
  const char* const* sites;      // "file.cu:12" by site number
  int n_globals;
  const GlobalVariable* globals;
};

}  // namespace emu
