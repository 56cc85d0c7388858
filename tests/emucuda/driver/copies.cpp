// Copies and fills.
//
// Rules:
//  * The direction is that of the two pointers, whatever the entry point is called.
//  * An asynchronous copy whose host side is not pinned is counted ("copy.pageable"): from pageable memory the driver takes
//    the bytes at once; to pageable memory the call waits for the stream, as the real one may.
//  * A range that leaves its allocation is refused at once.
#include <cstring>
#include <memory>

#include "api.h"
#include "shadow.h"

namespace emu {

struct Side {
  uintptr_t address;
  Allocation* allocation;  // null: pageable host memory
  bool device() const { return allocation && !allocation->host; }
  size_t offset() const { return address - allocation->base; }
};

static bool fits(const Side& side, size_t bytes) {
  if (side.allocation) return side.offset() + bytes <= side.allocation->bytes;
  return !in_device_range(side.address);
}

static std::string direction(const Side& to, const Side& from) {
  return std::string("copy.") + (from.device() ? "d" : "h") + "2" + (to.device() ? "d" : "h");
}

static Side side_at(uintptr_t address) { return {address, owner_of(address)}; }

static Failure run_copy(const Actor& actor, uintptr_t to_address, uintptr_t from_address, size_t bytes) {
  Side to = side_at(to_address), from = side_at(from_address);
  if (in_device_range(to_address) > bool(to.allocation) || in_device_range(from_address) > bool(from.allocation))
    return {CUDA_ERROR_ILLEGAL_ADDRESS, actor.label + ": one side was freed before the copy ran"};
  if (control().checked) {
    if (from.allocation) check_range(actor, *from.allocation, from.offset(), bytes, kRead);
    if (to.allocation) {
      check_range(actor, *to.allocation, to.offset(), bytes, kWrite);
      copy_initialisation(to.allocation, to.offset(), from.allocation, from.allocation ? from.offset() : 0, bytes);
    }
  }
  memcpy(reinterpret_cast<void*>(to_address), reinterpret_cast<void*>(from_address), bytes);
  return {};
}

static CUresult copy_async(uintptr_t to_address, uintptr_t from_address, size_t bytes, CUstream handle) {
  Lock lock(mutex());
  Stream* stream = stream_of(handle);
  Side to = side_at(to_address), from = side_at(from_address);
  std::string label = direction(to, from);
  if (CUresult fault = this_call().describe(label, stream, bytes)) return fault;
  if (!fits(to, bytes) || !fits(from, bytes))
    return explain(CUDA_ERROR_INVALID_VALUE, label + " of " + std::to_string(bytes) + " bytes leaves its allocation");
  bool pageable = !to.allocation || !from.allocation;
  if (pageable) ++control().counts["copy.pageable"];
  if (pageable && stream->capture)
    return explain(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "a copy with pageable memory cannot be captured");
  if (from.allocation) {
    enqueue(stream, label, [=](const Actor& actor) { return run_copy(actor, to_address, from_address, bytes); });
  } else {
    auto* start = reinterpret_cast<const char*>(from_address);
    auto staged = std::make_shared<std::vector<char>>(start, start + bytes);
    enqueue(stream, label, [=](const Actor& actor) {
      return run_copy(actor, to_address, reinterpret_cast<uintptr_t>(staged->data()), bytes);
    });
  }
  if (to.allocation) return CUDA_SUCCESS;
  ++control().counts["sync.implicit"];
  synchronize(lock, stream);
  return context().sticky;
}

static CUresult copy_blocking(uintptr_t to, uintptr_t from, size_t bytes) {
  if (CUresult error = copy_async(to, from, bytes, nullptr)) return error;
  Lock lock(mutex());
  ++control().counts["copy.synchronous"];
  synchronize(lock, &legacy_stream());
  return context().sticky;
}

static uintptr_t at(const void* p) { return reinterpret_cast<uintptr_t>(p); }

EMU_API(cuMemcpyAsync, 4000, CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return copy_async(to, from, bytes, stream);
}
EMU_API(cuMemcpyHtoDAsync, 3020, CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  return copy_async(to, at(from), bytes, stream);
}
EMU_API(cuMemcpyDtoHAsync, 3020, void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return copy_async(at(to), from, bytes, stream);
}
EMU_API(cuMemcpyDtoDAsync, 3020, CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return copy_async(to, from, bytes, stream);
}
EMU_API(cuMemcpy, 4000, CUdeviceptr to, CUdeviceptr from, size_t bytes) { return copy_blocking(to, from, bytes); }
EMU_API(cuMemcpyHtoD, 3020, CUdeviceptr to, const void* from, size_t bytes) {
  return copy_blocking(to, at(from), bytes);
}
EMU_API(cuMemcpyDtoH, 3020, void* to, CUdeviceptr from, size_t bytes) { return copy_blocking(at(to), from, bytes); }
EMU_API(cuMemcpyDtoD, 3020, CUdeviceptr to, CUdeviceptr from, size_t bytes) { return copy_blocking(to, from, bytes); }

// ---- fills ------------------------------------------------------------------------------------------------------------
template <class Word>
static CUresult fill(CUdeviceptr address, Word value, size_t n, CUstream handle) {
  Lock lock(mutex());
  Stream* stream = stream_of(handle);
  Side to = side_at(address);
  size_t bytes = n * sizeof(Word);
  if (CUresult fault = this_call().describe("memset", stream, bytes)) return fault;
  if (!to.allocation || !fits(to, bytes) || address % sizeof(Word))
    return explain(CUDA_ERROR_INVALID_VALUE, "memset leaves its allocation or is not aligned");
  enqueue(stream, "memset", [=](const Actor& actor) {
    Side target = side_at(address);
    if (!target.allocation) return Failure{CUDA_ERROR_ILLEGAL_ADDRESS, "memset of memory that was freed before it ran"};
    check_range(actor, *target.allocation, target.offset(), bytes, kWrite);
    auto* words = reinterpret_cast<Word*>(address);
    for (size_t i = 0; i < n; ++i) words[i] = value;
    return Failure{};
  });
  return CUDA_SUCCESS;
}
EMU_API(cuMemsetD8Async, 3020, CUdeviceptr to, unsigned char value, size_t n, CUstream stream) {
  return fill(to, value, n, stream);
}
EMU_API(cuMemsetD16Async, 3020, CUdeviceptr to, unsigned short value, size_t n, CUstream stream) {
  return fill(to, value, n, stream);
}
EMU_API(cuMemsetD32Async, 3020, CUdeviceptr to, unsigned value, size_t n, CUstream stream) {
  return fill(to, value, n, stream);
}

}  // namespace emu
