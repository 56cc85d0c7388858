// One block of threads, run as fibers.
//
// Rules:
//  * Each CUDA thread is a fiber; they share one OS thread and switch only where they wait: at barriers, warp operations and
//    volatile loads. So between two such points a thread runs alone, and an unordered access is found by the shadow of
//    shared memory, or shows when the threads' order is changed (control().thread_order).
//  * A warp operation completes when all live lanes of its mask have arrived; the last to arrive computes it for all.
//  * A thread that has exited counts as arrived everywhere, as on the device.
//  * When no fiber can run and some are left, the block is deadlocked: that is an error which says who waits where.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "../kernel/kernel_abi.h"
#include "grid.h"

namespace emu {

struct Warp {
  uint32_t live, runnable, arrived;
  uint32_t sync_phase;  // counts __syncwarp
  uint64_t key[32];     // operation and mask that each arrived lane waits with
  int site[32];
  LaneSlot slot[32];
};

struct Barrier {
  int arrived, expected;  // expected 0: all live threads
  uint32_t n_true, result;
  uint32_t waiting[32];   // lanes by warp
};

struct CpAsync {
  char* to;
  const char* from;
  int bytes, source_bytes, site;
};

class BlockRunner;
struct Fiber : Thread {
  void* stack_pointer;
  char* stack;
  Warp* warp;
  BlockRunner* runner;
  int waits_at;  // site, for the deadlock report
  const char* waits_for;
  std::vector<std::vector<CpAsync>> copies;  // groups; the last is open
};

// What the checker remembers of a byte of shared memory; see shared_shadow.cpp.
struct SharedByte {
  uint32_t write_phase, write_warp_phase, read_phase, read_warp_phase;
  int16_t writer, reader;     // thread, or one of the special values
  uint8_t written, atomic;
  uint16_t write_site, read_site;
  int16_t pending;            // thread + 1 whose cp.async is on its way here
};

class BlockRunner {
 public:
  BlockRunner();
  void start_grid(const GridLaunch&, const Actor&, bool checked, unsigned order);
  bool run_block(Dim block);  // false after a failure
  const Failure& failure() const { return failure_; }
  Fiber* current() const { return current_; }

  void warp_operation(Fiber&, WarpOp, uint32_t mask, int site);
  void barrier(Fiber&, int id, int count, int site, bool waits, bool predicate);
  uint32_t barrier_result(int id) const { return barriers_[id].result; }
  void yield(Fiber&, int site);
  void check_global(Fiber&, const char* address, int bytes, Access, int site);
  void check_shared(Fiber&, const char* address, int bytes, Access, int site);
  void cp_async(Fiber&, const CpAsync&);
  void cp_async_wait(Fiber&, int groups_left);
  [[noreturn]] void fail(const Fiber&, CUresult, const std::string& why, int site);
  void note(const Fiber&, const char* kind, const std::string& what, int site);  // a finding; the kernel runs on
  void run_current();  // the body of a fiber; does not return

 private:
  void prepare_fiber(int i, Dim block);
  void switch_away(Fiber&);
  Fiber* next_fiber(const Fiber& after);
  uint32_t first_lane(uint32_t lanes, uint32_t after) const;
  void leave(void** save);
  [[noreturn]] void deadlock(const Fiber&);
  bool try_complete(Warp&, uint32_t mask, const Fiber&);
  void combine(Warp&, WarpOp, uint32_t lanes, const Fiber&);
  void release_barrier(Barrier&);
  void write_shared(Fiber&, SharedByte&, Access, int site);
  void read_shared(Fiber&, SharedByte&, int site);
  std::string where(int site) const;
  std::string other_side(int16_t who, const char* verb, int site) const;

  const GridLaunch* launch_ = nullptr;
  const Actor* actor_ = nullptr;
  bool checked_ = false;
  unsigned order_ = 0, random_ = 1;
  int n_threads_ = 0, n_live_ = 0, n_warps_ = 0;
  std::vector<Fiber> fibers_;
  std::unique_ptr<Warp[]> warps_;
  Barrier barriers_[16];
  std::vector<char> shared_;
  std::vector<SharedByte> shadow_;
  uint32_t phase_ = 1;  // counts barriers of the block
  uint64_t yields_ = 0;
  double started_ = 0;
  Fiber* current_ = nullptr;
  void* main_stack_pointer_ = nullptr;
  Failure failure_;
};

extern thread_local BlockRunner* active_runner;
extern const Runtime kRuntime;
void combine_tensor_op(Warp&, WarpOp);
void print_formatted(Thread*, const char* format, const char* arguments);
void install_fault_handler();  // turns a wild access of a kernel into its failure

}  // namespace emu
