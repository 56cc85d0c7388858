// Checks of shared memory: bounds, bytes never written, races inside a block, and cp.async not waited for.
//
// Rules:
//  * Two threads race on a byte when one writes and no barrier lies between; inside a warp __syncwarp is enough. Shuffles,
//    votes and mma do not order memory, as the programming guide says.
//  * Atomics race with plain accesses, not with each other.
//  * Readers between two barriers are remembered as one thread, one warp (kWarp | warp) or everybody.
//  * A byte that cp.async is still to fill may be touched by nobody until its thread has waited; then it counts as written by
//    that thread.
#include <cstdio>
#include <cstring>

#include "api.h"
#include "block.h"

namespace emu {

constexpr int16_t kWarp = 1 << 10;
constexpr int16_t kEverybody = 1 << 11;

static int warp_of(int16_t who) { return who & kWarp ? who & ~kWarp : who / 32; }

// Whether the last access by `who` is unordered with one that `f` makes now.
static bool unordered(int16_t who, uint32_t their_phase, uint32_t their_warp_phase, const Fiber& f, uint32_t phase) {
  if (their_phase != phase || who == int16_t(f.linear)) return false;
  if (who == kEverybody || warp_of(who) != int(f.linear / 32)) return true;
  return their_warp_phase == f.warp->sync_phase;
}

std::string BlockRunner::other_side(int16_t who, const char* verb, int site) const {
  std::string name = who == kEverybody ? "several warps"
                     : who & kWarp     ? "warp " + std::to_string(who & ~kWarp)
                                       : "thread " + std::to_string(who);
  return " of shared memory, unordered with a " + std::string(verb) + " by " + name + " at " + where(site);
}

void BlockRunner::write_shared(Fiber& f, SharedByte& s, Access access, int site) {
  bool both_atomic = access == kAtomic && s.atomic;
  if (!both_atomic && unordered(s.writer, s.write_phase, s.write_warp_phase, f, phase_))
    note(f, "shared-race", "write" + other_side(s.writer, "write", s.write_site), site);
  if (unordered(s.reader, s.read_phase, s.read_warp_phase, f, phase_))
    note(f, "shared-race", "write" + other_side(s.reader, "read", s.read_site), site);
  s.writer = int16_t(f.linear);
  s.write_phase = phase_;
  s.write_warp_phase = f.warp->sync_phase;
  s.written = 1;
  s.write_site = uint16_t(site);
  s.atomic = access == kAtomic;
}

void BlockRunner::read_shared(Fiber& f, SharedByte& s, int site) {
  if (!s.written) note(f, "uninitialised", "read of shared memory that was never written", site);
  if (unordered(s.writer, s.write_phase, s.write_warp_phase, f, phase_))
    note(f, "shared-race", "read" + other_side(s.writer, "write", s.write_site), site);
  auto me = int16_t(f.linear);
  if (s.read_phase != phase_ || s.reader == me) {
    s.reader = me;
  } else if (s.reader != kEverybody) {
    bool same_warp = warp_of(s.reader) == int(f.linear / 32);
    bool after_sync = s.read_warp_phase != f.warp->sync_phase;
    s.reader = !same_warp ? kEverybody : after_sync ? me : int16_t(kWarp | int16_t(f.linear / 32));
  }
  s.read_phase = phase_;
  s.read_site = uint16_t(site);
  s.read_warp_phase = f.warp->sync_phase;
}

void BlockRunner::check_shared(Fiber& f, const char* address, int bytes, Access access, int site) {
  long offset = address - f.shared;
  if (offset < 0 || offset + bytes > long(f.shared_bytes))
    fail(f, CUDA_ERROR_ILLEGAL_ADDRESS,
         "out of bounds: shared memory access of " + std::to_string(bytes) + " bytes at offset " + std::to_string(offset) +
             ", " + std::to_string(f.shared_bytes) + " bytes are allocated",
         site);
  if (offset % bytes) fail(f, CUDA_ERROR_MISALIGNED_ADDRESS, "misaligned access of shared memory", site);
  for (int i = 0; i < bytes; ++i) {
    SharedByte& s = shadow_[size_t(offset + i)];
    if (s.pending)
      note(f, "cp-async-unwaited",
           "access of shared memory that cp.async of thread " + std::to_string(s.pending - 1) + " has not been waited for", site);
    if (access == kRead)
      read_shared(f, s, site);
    else
      write_shared(f, s, access, site);
  }
}

// ---- cp.async: with checking on, the bytes arrive when the thread waits --------------------------------------------------
void BlockRunner::cp_async(Fiber& f, const CpAsync& copy) {
  check_shared(f, copy.to, copy.bytes, kWrite, copy.site);
  if (copy.source_bytes > 0 && reinterpret_cast<uintptr_t>(copy.from) % uintptr_t(copy.bytes))
    fail(f, CUDA_ERROR_MISALIGNED_ADDRESS, "misaligned source of cp.async", copy.site);
  for (int done = 0, n; done < copy.source_bytes; done += n) {  // any size up to 16: in power-of-two pieces
    n = 16;
    while (n > copy.source_bytes - done || (reinterpret_cast<uintptr_t>(copy.from) + uintptr_t(done)) % uintptr_t(n)) n /= 2;
    check_global(f, copy.from + done, n, kRead, copy.site);
  }
  size_t offset = size_t(copy.to - f.shared);
  for (int i = 0; i < copy.bytes; ++i) shadow_[offset + size_t(i)].pending = int16_t(f.linear + 1);
  f.copies.back().push_back(copy);
}

void BlockRunner::cp_async_wait(Fiber& f, int groups_left) {
  auto& groups = f.copies;
  while (int(groups.size()) - 1 > groups_left) {
    for (auto& copy : groups.front()) {
      memcpy(copy.to, copy.from, size_t(copy.source_bytes));
      memset(copy.to + copy.source_bytes, 0, size_t(copy.bytes - copy.source_bytes));
      size_t offset = size_t(copy.to - f.shared);
      for (int i = 0; i < copy.bytes; ++i) {
        SharedByte& s = shadow_[offset + size_t(i)];
        s.pending = 0;
        write_shared(f, s, kWrite, copy.site);
      }
    }
    groups.erase(groups.begin());
  }
}

}  // namespace emu
