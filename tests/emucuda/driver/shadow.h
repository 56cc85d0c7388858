// What the checker remembers of each allocation: who wrote and read it last, and which bytes were ever written.
//
// Rules:
//  * Only operations that run while checking is on look at it, and those run one at a time (see streams.cpp).
//  * Two accesses race when different participants make them, at least one writes, and neither happens before the
//    other by stream order, events, or the host's waits.
//  * The grain is two bytes: the smallest alignment between cells that different streams own.
//  * Three readers are remembered per grain: one per stream of a design with a compute, a save and a restore stream.
#pragma once
#include "../kernel/kernel_abi.h"
#include "state.h"

namespace emu {

// Reports a race, if there is one, of an access to [offset, offset + bytes) with an earlier one; remembers it.
void check_range(const Actor&, Allocation&, size_t offset, size_t bytes, Access, const char* where = "");
// Whether some byte of the range was never written. False where that is not tracked.
bool uninitialised(const Allocation&, size_t offset, size_t bytes);
// A copy carries along whether bytes were ever written.
void copy_initialisation(Allocation* to, size_t to_offset, const Allocation* from, size_t from_offset, size_t bytes);
void drop_shadow(Allocation&);  // locked
bool in_device_range(uintptr_t address);

}  // namespace emu
