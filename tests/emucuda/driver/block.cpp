#include "block.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "api.h"
#include "shadow.h"

namespace emu {

thread_local BlockRunner* active_runner = nullptr;

// ---- fibers -------------------------------------------------------------------------------------------------------
constexpr size_t kStackBytes = 256 << 10;
constexpr size_t kGuardBytes = 4096;

// Saves the callee-saved registers and the stack pointer, and goes on where `to` was saved.
extern "C" void emu_switch(void** from, void* to);
#if defined(__x86_64__)
asm(R"(
.text
.type emu_switch,@function
emu_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
)");
static void* initial_stack(char* top, void (*start)()) {
  void** sp = reinterpret_cast<void**>(top);
  *--sp = nullptr;
  *--sp = reinterpret_cast<void*>(start);
  for (int i = 0; i < 6; ++i) *--sp = nullptr;
  return sp;
}
#elif defined(__aarch64__)
asm(R"(
.text
.type emu_switch,%function
emu_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]; stp x21, x22, [sp, #16]; stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]; stp x27, x28, [sp, #64]; stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]; stp d10, d11, [sp, #112]; stp d12, d13, [sp, #128]; stp d14, d15, [sp, #144]
  mov x2, sp
  str x2, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]; ldp x21, x22, [sp, #16]; ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]; ldp x27, x28, [sp, #64]; ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]; ldp d10, d11, [sp, #112]; ldp d12, d13, [sp, #128]; ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
static void* initial_stack(char* top, void (*start)()) {
  char* sp = top - 160;
  memset(sp, 0, 160);
  reinterpret_cast<void**>(sp)[11] = reinterpret_cast<void*>(start);  // x30
  return sp;
}
#else
#error "the emulated driver switches fibers on x86-64 and aarch64 only"
#endif

static void fiber_start() { active_runner->run_current(); }

// ---- blocks -------------------------------------------------------------------------------------------------------
BlockRunner::BlockRunner() : warps_(new Warp[32]) { fibers_.reserve(1024); }

void BlockRunner::start_grid(const GridLaunch& launch, const Actor& actor, bool checked, unsigned order) {
  launch_ = &launch;
  actor_ = &actor;
  checked_ = checked;
  order_ = order;
  random_ = order;
  failure_ = {};
  started_ = now();
  yields_ = 0;
  n_threads_ = int(launch.block.x * launch.block.y * launch.block.z);
  n_warps_ = (n_threads_ + 31) / 32;
  while (int(fibers_.size()) < n_threads_) {
    Fiber f{};
    f.stack = static_cast<char*>(mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0));
    mprotect(f.stack, kGuardBytes, PROT_NONE);
    fibers_.push_back(f);
  }
  size_t bytes = size_t(launch.kernel->static_shared_bytes) + launch.dynamic_shared;
  shared_.resize(bytes + 1024);
}

void BlockRunner::prepare_fiber(int i, Dim block) {
  Fiber& f = fibers_[size_t(i)];
  Dim size = launch_->block;
  auto n = uint32_t(i);
  f.tid = {n % size.x, n / size.x % size.y, n / (size.x * size.y)};
  f.ntid = size;
  f.ctaid = block;
  f.nctaid = launch_->grid;
  f.lane = n & 31;
  f.linear = n;
  f.checked = checked_;
  f.shared = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(shared_.data()) + 1023) & ~uintptr_t(1023));
  f.shared_bytes = uint32_t(launch_->kernel->static_shared_bytes) + launch_->dynamic_shared;
  f.globals = launch_->globals.data();
  f.rt = &kRuntime;
  f.warp = &warps_[n / 32];
  f.slot = &f.warp->slot[f.lane];
  f.runner = this;
  f.waits_for = nullptr;
  if (checked_) f.copies.assign(1, {});
  f.warp->live |= 1u << f.lane;
  // Stacks start at staggered offsets: equal ones would share the same few cache sets.
  char* top = f.stack + kStackBytes - 64 - size_t(i % 64) * 832 / 64 * 64;
  f.stack_pointer = initial_stack(top, fiber_start);
}

bool BlockRunner::run_block(Dim block) {
  for (int w = 0; w < n_warps_; ++w) {
    warps_[w].live = warps_[w].arrived = 0;
    warps_[w].sync_phase = 1;
  }
  for (auto& b : barriers_) b = Barrier{};
  n_live_ = n_threads_;
  phase_ = 1;
  for (int i = 0; i < n_threads_; ++i) prepare_fiber(i, block);
  for (int w = 0; w < n_warps_; ++w) warps_[w].runnable = warps_[w].live;
  size_t bytes = fibers_[0].shared_bytes;
  memset(fibers_[0].shared, 0xff, bytes);  // NaNs, as in fresh device memory
  if (checked_) shadow_.assign(bytes, SharedByte{});
  active_runner = this;
  current_ = &fibers_[order_ == 1 ? size_t(n_threads_ - 1) : 0];
  emu_switch(&main_stack_pointer_, current_->stack_pointer);
  active_runner = nullptr;
  return !failure_.code;
}

void BlockRunner::run_current() {
  Fiber& f = *current_;
  launch_->kernel->entry(&f, const_cast<char*>(launch_->parameters.data()));
  Warp& w = *f.warp;
  w.live &= ~(1u << f.lane);
  w.runnable &= ~(1u << f.lane);
  if (--n_live_ == 0) leave(&f.stack_pointer);
  for (uint32_t left = w.arrived; left;) {  // operations that waited for this lane only
    int waiting = __builtin_ctz(left);
    uint32_t mask = uint32_t(w.key[waiting]);
    if (mask >> f.lane & 1)
      note(f, "missing-lane", "the mask of a warp operation names a lane that exits without taking part", w.site[waiting]);
    try_complete(w, mask, f);
    left &= ~mask;
  }
  for (auto& b : barriers_)
    if (b.arrived && !b.expected && b.arrived == n_live_) release_barrier(b);
  switch_away(f);
}

void BlockRunner::leave(void** save) { emu_switch(save, main_stack_pointer_); }

// ---- which thread runs next -----------------------------------------------------------------------------------------
uint32_t BlockRunner::first_lane(uint32_t lanes, uint32_t after) const {
  if (order_ == 1) {
    uint32_t below = lanes & ((1u << after) - 1);
    return 31u - uint32_t(__builtin_clz(below ? below : lanes));
  }
  uint32_t above = after == 31 ? 0 : lanes & ~((2u << after) - 1);
  return uint32_t(__builtin_ctz(above ? above : lanes));
}

// The next runnable lane of the same warp, else of the next warp that has one.
Fiber* BlockRunner::next_fiber(const Fiber& after) {
  int warp = int(after.linear / 32);
  uint32_t lane = after.lane;
  if (order_ > 1) {
    random_ = random_ * 1664525u + 1013904223u;
    lane = random_ >> 27;
    warp = int((random_ >> 8) % uint32_t(n_warps_));
  }
  for (int i = 0; i < n_warps_; ++i) {
    if (uint32_t lanes = warps_[warp].runnable) return &fibers_[size_t(warp) * 32 + first_lane(lanes, lane)];
    if (order_ == 1)
      warp = warp ? warp - 1 : n_warps_ - 1, lane = 0;
    else
      warp = warp + 1 < n_warps_ ? warp + 1 : 0, lane = 31;
  }
  return nullptr;
}

void BlockRunner::switch_away(Fiber& f) {
  Fiber* next = next_fiber(f);
  if (!next) deadlock(f);
  current_ = next;
  if (next != &f) emu_switch(&f.stack_pointer, next->stack_pointer);
}

// Goes round all threads of the block, so that whoever is waited for gets its turn.
void BlockRunner::yield(Fiber& f, int site) {
  constexpr uint64_t kLookAtTheClock = 1 << 16;
  if (++yields_ % kLookAtTheClock == 0 && now() - started_ > control().patience)
    fail(f, CUDA_ERROR_LAUNCH_TIMEOUT, "waits in a loop for something that never comes", site);
  uint32_t& runnable = f.warp->runnable;
  uint32_t all = runnable;
  uint32_t ahead = order_ == 1 ? (1u << f.lane) - 1 : f.lane == 31 ? 0 : ~0u << (f.lane + 1);
  if (order_ <= 1) runnable = all & ahead;  // then the other warps, then this one from its beginning
  Fiber* next = next_fiber(f);
  runnable = all;
  if (!next) next = &fibers_[f.linear / 32 * 32 + first_lane(all, order_ == 1 ? 0 : 31)];
  if (next == &f) return;
  current_ = next;
  emu_switch(&f.stack_pointer, next->stack_pointer);
}

// ---- warp operations ------------------------------------------------------------------------------------------------
void BlockRunner::warp_operation(Fiber& f, WarpOp op, uint32_t mask, int site) {
  Warp& w = *f.warp;
  uint32_t me = 1u << f.lane;
  if (!(mask & me)) fail(f, CUDA_ERROR_LAUNCH_FAILED, "a warp operation whose mask does not name the calling lane", site);
  w.key[f.lane] = uint64_t(op) << 32 | mask;
  w.site[f.lane] = site;
  w.arrived |= me;
  if (try_complete(w, mask, f)) return;
  w.runnable &= ~me;
  f.waits_at = site;
  f.waits_for = "the other lanes of a warp operation";
  switch_away(f);
}

bool BlockRunner::try_complete(Warp& w, uint32_t mask, const Fiber& f) {
  uint32_t need = mask & w.live;
  if (!need || (w.arrived & need) != need) return false;
  int first = __builtin_ctz(need);
  for (uint32_t left = need; left; left &= left - 1) {
    int lane = __builtin_ctz(left);
    if (w.key[lane] != w.key[first])
      fail(f, CUDA_ERROR_LAUNCH_FAILED,
           "lanes of a warp meet in different operations or masks: " + where(w.site[first]) + " and " + where(w.site[lane]),
           w.site[lane]);
  }
  combine(w, WarpOp(w.key[first] >> 32), need, f);
  w.arrived &= ~need;
  w.runnable |= need;
  return true;
}

// ---- barriers -------------------------------------------------------------------------------------------------------
void BlockRunner::release_barrier(Barrier& b) {
  for (int w = 0; w < n_warps_; ++w) warps_[w].runnable |= b.waiting[w];
  uint32_t n_true = b.n_true;
  b = Barrier{};
  b.result = n_true;
  ++phase_;
}

void BlockRunner::barrier(Fiber& f, int id, int count, int site, bool waits, bool predicate) {
  Barrier& b = barriers_[id & 15];
  if (b.arrived && b.expected != count)
    fail(f, CUDA_ERROR_LAUNCH_FAILED, "threads meet at one barrier with different thread counts", site);
  b.expected = count;
  b.n_true += predicate;
  if (++b.arrived == (count ? count : n_live_)) return release_barrier(b);
  if (!waits) return;
  uint32_t me = 1u << f.lane;
  b.waiting[f.linear / 32] |= me;
  f.warp->runnable &= ~me;
  f.waits_at = site;
  f.waits_for = "a barrier";
  switch_away(f);
}

// ---- failures and findings --------------------------------------------------------------------------------------------
std::string BlockRunner::where(int site) const { return launch_->kernel->sites[site]; }

static std::string place(const Fiber& f) {
  char text[128];
  snprintf(text, sizeof text, "block (%u,%u,%u) thread (%u,%u,%u)", f.ctaid.x, f.ctaid.y, f.ctaid.z, f.tid.x, f.tid.y,
           f.tid.z);
  return text;
}

void BlockRunner::fail(const Fiber& f, CUresult code, const std::string& why, int site) {
  std::string at = site >= 0 ? where(site) + ": " : "";
  failure_ = {code, at + why + " (" + actor_->label + ", " + place(f) + ")"};
  void* never;
  leave(&never);
  abort();
}

void BlockRunner::note(const Fiber& f, const char* kind, const std::string& what, int site) {
  report({kind, actor_->label, where(site), what + " (" + place(f) + ")"});
}

void BlockRunner::deadlock(const Fiber& f) {
  std::string text = "deadlock:";
  int shown = 0;
  const Fiber* last = nullptr;
  for (int i = 0; i < n_threads_ && shown < 4; ++i) {
    const Fiber& each = fibers_[size_t(i)];
    if (!(each.warp->live >> each.lane & 1) || (last && last->waits_at == each.waits_at)) continue;
    text += (shown++ ? "; " : " ") + place(each) + " waits at " + where(each.waits_at) + " for " + each.waits_for;
    last = &each;
  }
  fail(f, CUDA_ERROR_LAUNCH_FAILED, text, -1);
}

// ---- global memory ------------------------------------------------------------------------------------------------------
static std::string describe_address(uintptr_t address) {
  Lock lock(mutex());
  const Allocation* below = nullptr;
  for (auto& each : memory().live)
    if (each.second->base <= address && (!below || each.second->base > below->base)) below = each.second;
  if (!in_device_range(address)) return "an address that is not device memory";
  if (!below) return "memory that is not allocated";
  size_t past = address - (below->base + below->bytes);
  return past < (1 << 20) ? std::to_string(past) + " bytes past the end of a " + std::to_string(below->bytes) + "-byte allocation"
                          : "memory that was freed or never allocated";
}

static const char* verb_of(Access access) {
  return access == kRead ? "read" : access == kWrite ? "write" : "atomic update";
}

void BlockRunner::check_global(Fiber& f, const char* address, int bytes, Access access, int site) {
  auto a = reinterpret_cast<uintptr_t>(address);
  if (address >= f.shared && address < f.shared + f.shared_bytes) return check_shared(f, address, bytes, access, site);
  if (address >= f.stack && address < f.stack + kStackBytes) return;  // local memory through a generic address
  const auto& parameters = launch_->parameters;
  if (address >= parameters.data() && address < parameters.data() + parameters.size()) return;
  auto access_text = [&] { return std::to_string(bytes) + "-byte " + verb_of(access); };
  if (a % uintptr_t(bytes)) fail(f, CUDA_ERROR_MISALIGNED_ADDRESS, "misaligned " + access_text(), site);
  Allocation* allocation = owner_of(a);
  if (!allocation) fail(f, CUDA_ERROR_ILLEGAL_ADDRESS, "out of bounds: " + access_text() + " of " + describe_address(a), site);
  size_t offset = a - allocation->base;
  auto place_text = [&] { return " at byte " + std::to_string(offset) + " of a " + std::to_string(allocation->bytes) + "-byte allocation"; };
  if (offset + size_t(bytes) > allocation->bytes)
    fail(f, CUDA_ERROR_ILLEGAL_ADDRESS, "out of bounds: " + access_text() + place_text(), site);
  if (access != kWrite && uninitialised(*allocation, offset, size_t(bytes)))
    note(f, "uninitialised", access_text() + place_text() + " that was never written there", site);
  check_range(*actor_, *allocation, offset, size_t(bytes), access, launch_->kernel->sites[site]);
}

}  // namespace emu
