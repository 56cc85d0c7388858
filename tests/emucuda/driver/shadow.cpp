#include "shadow.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "api.h"

namespace emu {

constexpr size_t kGrain = 2;
constexpr int kReaders = 3;

// participant (6 bits) | atomic (1 bit) | time (25 bits); 0: none
using Stamp = uint32_t;
static Stamp stamp(const Actor& actor, Access access) {
  uint32_t time = actor.clock.time[size_t(actor.participant)] & 0x1ffffff;
  return uint32_t(actor.participant) << 26 | uint32_t(access == kAtomic) << 25 | time;
}
static int participant(Stamp s) { return int(s >> 26); }
static uint32_t time_of(Stamp s) { return s & 0x1ffffff; }
static bool is_atomic(Stamp s) { return s >> 25 & 1; }
static bool concurrent(const Actor& actor, Stamp s) {
  return s && participant(s) != actor.participant && actor.clock.time[size_t(participant(s))] < time_of(s);
}

struct Grain {
  Stamp write;
  Stamp read[kReaders];
};
struct Shadow {
  Grain* grains;
  uint8_t* written;  // one byte per byte: 1 once written
  size_t grain_bytes, written_bytes;
};

static void* zeros(size_t bytes) {
  return mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}
static Shadow& shadow_of(Allocation& a) {
  if (!a.shadow) {
    size_t grain_bytes = (a.bytes / kGrain + 1) * sizeof(Grain);
    a.shadow = new Shadow{static_cast<Grain*>(zeros(grain_bytes)), static_cast<uint8_t*>(zeros(a.bytes)), grain_bytes,
                          a.bytes};
  }
  return *a.shadow;
}
void drop_shadow(Allocation& a) {
  if (!a.shadow) return;
  munmap(a.shadow->grains, a.shadow->grain_bytes);
  munmap(a.shadow->written, a.shadow->written_bytes);
  delete a.shadow;
  a.shadow = nullptr;
}

static void report_race(const Actor& actor, const Allocation& a, size_t offset, Access access, Stamp other,
                        const char* what_other_did, const char* where) {
  char text[512];
  const char* verb = access == kRead ? "reads" : access == kWrite ? "writes" : "updates";
  snprintf(text, sizeof text, "%s on stream %d %s byte %zu of a %zu-byte buffer that %s on stream %d %s, with no event between",
           actor.label.c_str(), actor.participant, verb, offset, a.bytes,
           operation_name(participant(other), time_of(other)).c_str(), participant(other), what_other_did);
  report({"stream-race", actor.label, where, text});
}

static void remember_read(Grain& grain, const Actor& actor, Stamp me) {
  int place = 0;
  for (int i = 0; i < kReaders; ++i) {
    if (grain.read[i] && participant(grain.read[i]) == actor.participant) {
      grain.read[i] = me;
      return;
    }
    if (!concurrent(actor, grain.read[i])) place = i;
  }
  grain.read[place] = me;
}

void check_range(const Actor& actor, Allocation& a, size_t offset, size_t bytes, Access access, const char* where) {
  if (!control().checked || !bytes) return;
  Shadow& shadow = shadow_of(a);
  Stamp me = stamp(actor, access);
  bool reported = false;
  if (a.born_at && a.born_on != actor.participant && actor.clock.time[size_t(a.born_on)] < a.born_at) {
    report_race(actor, a, offset, access, uint32_t(a.born_on) << 26 | a.born_at, "allocates", where);
    reported = true;
  }
  size_t last = (offset + bytes - 1) / kGrain;
  for (size_t i = offset / kGrain; i <= last; ++i) {
    Grain& grain = shadow.grains[i];
    if (grain.write == me && access != kRead) continue;
    if (!reported && concurrent(actor, grain.write) && !(access == kAtomic && is_atomic(grain.write))) {
      report_race(actor, a, i * kGrain, access, grain.write, "writes", where);
      reported = true;
    }
    if (access == kRead) {
      remember_read(grain, actor, me);
      continue;
    }
    for (Stamp read : grain.read)
      if (!reported && concurrent(actor, read)) {
        report_race(actor, a, i * kGrain, access, read, "reads", where);
        reported = true;
      }
    grain = Grain{me, {}};
  }
  if (access != kRead) memset(shadow.written + offset, 1, bytes);
}

bool uninitialised(const Allocation& a, size_t offset, size_t bytes) {
  if (!a.tracks_initialisation) return false;
  if (!a.shadow) return true;
  for (size_t i = 0; i < bytes; ++i)
    if (!a.shadow->written[offset + i]) return true;
  return false;
}

void copy_initialisation(Allocation* to, size_t to_offset, const Allocation* from, size_t from_offset, size_t bytes) {
  if (!control().checked || !to || !to->tracks_initialisation) return;
  uint8_t* marks = shadow_of(*to).written + to_offset;
  if (!from || !from->tracks_initialisation)
    memset(marks, 1, bytes);
  else if (from->shadow)
    memmove(marks, from->shadow->written + from_offset, bytes);
  else
    memset(marks, 0, bytes);
}

}  // namespace emu
