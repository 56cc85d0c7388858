// Device and pinned memory.
//
// Rules:
//  * All of it lies in one reserved range of addresses, handed out upwards and not reused while room is left, so that a
//    use after free always meets an unmapped page.
//  * An allocation has its pages to itself, and at least one page without access follows it.
//  * Pages have an owner table, so that a checked access finds its allocation without a lock.
//  * Fresh device memory is filled with 0xFF: NaN as f16, bf16, f32 and f64, and -1 as an integer.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "api.h"
#include "shadow.h"

namespace emu {

constexpr size_t kPage = 4096;
constexpr size_t kArenaBytes = size_t(1) << 38;
constexpr size_t kPoisonLimit = size_t(256) << 20;

static void* reserve(size_t bytes, int protection) {
  void* p = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? nullptr : p;
}

struct Arena {
  uintptr_t base, next;
  std::atomic<Allocation*>* owner;  // by page
  std::vector<std::pair<uintptr_t, size_t>> freed;  // reused only when the range is used up
  Arena() {
    base = next = reinterpret_cast<uintptr_t>(reserve(kArenaBytes, PROT_NONE));
    owner = static_cast<std::atomic<Allocation*>*>(reserve(kArenaBytes / kPage * sizeof(void*), PROT_READ | PROT_WRITE));
  }
  bool holds(uintptr_t address) const { return address - base < kArenaBytes; }
};
static Arena& arena() {
  static auto& a = *new Arena;
  return a;
}

MemoryUse& memory() {
  static auto& m = *new MemoryUse;
  return m;
}
Pool& device_pool() {
  static auto& p = *new Pool;
  return p;
}
Pool& host_pool() {
  static auto& p = *new Pool{true};
  return p;
}

Allocation* owner_of(uintptr_t address) {
  if (!arena().holds(address)) return nullptr;
  return arena().owner[(address - arena().base) / kPage].load(std::memory_order_relaxed);
}
bool in_device_range(uintptr_t address) { return arena().holds(address); }

static size_t padded(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage + kPage; }

static uintptr_t take_range(size_t bytes) {
  auto& a = arena();
  if (a.next + bytes <= a.base + kArenaBytes) {
    a.next += bytes;
    return a.next - bytes;
  }
  for (auto it = a.freed.begin(); it != a.freed.end(); ++it)
    if (it->second >= bytes) {
      uintptr_t start = it->first;
      a.freed.erase(it);
      return start;
    }
  return 0;
}

static void set_owner(const Allocation& a, Allocation* owner) {
  size_t first = (a.base - arena().base) / kPage, n = padded(a.bytes) / kPage - 1;
  for (size_t i = 0; i < n; ++i) arena().owner[first + i].store(owner, std::memory_order_relaxed);
}

Allocation* allocate(size_t bytes, bool host, Pool* pool) {
  auto& use = memory();
  bytes = std::max<size_t>(bytes, 1);
  if (!host && use.used + bytes > use.total) {
    explain(CUDA_ERROR_OUT_OF_MEMORY, std::to_string(bytes) + " bytes asked for, " +
                                          std::to_string(use.total - use.used) + " free");
    return nullptr;
  }
  uintptr_t base = take_range(padded(bytes));
  if (!base || mprotect(reinterpret_cast<void*>(base), padded(bytes) - kPage, PROT_READ | PROT_WRITE)) return nullptr;
  if (!host) memset(reinterpret_cast<void*>(base), 0xff, std::min(bytes, kPoisonLimit));
  auto* a = new Allocation;
  a->base = base;
  a->bytes = bytes;
  a->host = host;
  a->pool = pool;
  a->serial = ++use.serial;
  a->tracks_initialisation = control().checked && !host;
  if (!host) use.high = std::max(use.high, use.used += bytes);
  if (pool) pool->high = std::max(pool->high, pool->used += bytes);
  use.live[a->serial] = a;
  set_owner(*a, a);
  return a;
}

void release(Allocation* a) {
  set_owner(*a, nullptr);
  void* start = reinterpret_cast<void*>(a->base);
  madvise(start, padded(a->bytes) - kPage, MADV_DONTNEED);
  mprotect(start, padded(a->bytes) - kPage, PROT_NONE);
  arena().freed.emplace_back(a->base, padded(a->bytes));
  if (!a->host) memory().used -= a->bytes;
  if (a->pool) a->pool->used -= a->bytes;
  memory().live.erase(a->serial);
  drop_shadow(*a);
  delete a;
}

// ---- entry points ---------------------------------------------------------------------------------------------------
static Allocation* at_base(uintptr_t address) {
  Allocation* a = owner_of(address);
  return a && a->base == address ? a : nullptr;
}

static bool capture_forbids_allocation() {
  for (auto& each : streams())
    if (each.second->capture && each.second->capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED) return true;
  return false;
}

template <class Pointer>
static CUresult allocate_now(Pointer* out, size_t bytes, bool host) {
  Lock lock(mutex());
  if (!bytes) return CUDA_ERROR_INVALID_VALUE;
  if (CUresult fault = this_call().describe(host ? "alloc.pinned" : "alloc.device", nullptr, bytes)) return fault;
  if (capture_forbids_allocation())
    return explain(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "allocation while a stream captures");
  Allocation* a = allocate(bytes, host, nullptr);
  if (!a) return CUDA_ERROR_OUT_OF_MEMORY;
  *out = Pointer(a->base);
  return CUDA_SUCCESS;
}
EMU_API(cuMemAlloc, 3020, CUdeviceptr* out, size_t bytes) { return allocate_now(out, bytes, false); }
EMU_API(cuMemHostAlloc, 2020, void** out, size_t bytes, unsigned) { return allocate_now(out, bytes, true); }
EMU_API(cuMemAllocHost, 3020, void** out, size_t bytes) { return allocate_now(out, bytes, true); }

// Freeing waits for the whole device, as the real driver may.
static CUresult free_now(uintptr_t address) {
  Lock lock(mutex());
  if (!address) return CUDA_SUCCESS;
  if (!at_base(address)) return explain(CUDA_ERROR_INVALID_VALUE, "free of an address that is not an allocation");
  if (CUresult fault = this_call().describe("free.synchronous", nullptr)) return fault;
  ++control().counts["sync.implicit"];
  synchronize_all(lock);
  if (Allocation* a = at_base(address)) release(a);
  return CUDA_SUCCESS;
}
EMU_API(cuMemFree, 3020, CUdeviceptr address) { return free_now(address); }
EMU_API(cuMemFreeHost, 2000, void* address) { return free_now(reinterpret_cast<uintptr_t>(address)); }

static CUresult allocate_ordered(CUdeviceptr* out, size_t bytes, Pool& pool, Stream* stream) {
  if (CUresult fault = this_call().describe(pool.host ? "alloc.host_pool" : "alloc.device_pool", stream, bytes))
    return fault;
  if (stream->capture)
    return explain(CUDA_ERROR_NOT_SUPPORTED, "stream-ordered allocation while capturing is not emulated");
  Allocation* a = allocate(bytes, pool.host, &pool);
  if (!a) return CUDA_ERROR_OUT_OF_MEMORY;
  stream->clock.join(host_clock());
  a->born_on = stream->participant;
  a->born_at = ++stream->clock.time[size_t(stream->participant)];
  *out = a->base;
  return CUDA_SUCCESS;
}
EMU_API(cuMemAllocFromPoolAsync, 11020, CUdeviceptr* out, size_t bytes, CUmemoryPool pool, CUstream stream) {
  Lock lock(mutex());
  return allocate_ordered(out, bytes, *reinterpret_cast<Pool*>(pool), stream_of(stream));
}
EMU_API(cuMemAllocAsync, 11020, CUdeviceptr* out, size_t bytes, CUstream stream) {
  Lock lock(mutex());
  return allocate_ordered(out, bytes, device_pool(), stream_of(stream));
}
EMU_API(cuMemFreeAsync, 11020, CUdeviceptr address, CUstream handle) {
  Lock lock(mutex());
  Stream* stream = stream_of(handle);
  Allocation* a = at_base(address);
  if (!a) return explain(CUDA_ERROR_INVALID_VALUE, "free of an address that is not an allocation");
  if (CUresult fault = this_call().describe("free.ordered", stream)) return fault;
  enqueue(stream, "free", [address](const Actor& actor) {
    Lock lock(mutex());
    if (Allocation* freed = at_base(address)) {
      check_range(actor, *freed, 0, freed->bytes, kWrite);
      release(freed);
    }
    return Failure{};
  });
  return CUDA_SUCCESS;
}
EMU_API(cuMemGetInfo, 3020, size_t* free_bytes, size_t* total) {
  Lock lock(mutex());
  *free_bytes = memory().total - memory().used;
  *total = memory().total;
  return CUDA_SUCCESS;
}
EMU_API(cuMemHostGetDevicePointer, 3020, CUdeviceptr* out, void* address, unsigned) {
  *out = reinterpret_cast<CUdeviceptr>(address);
  return CUDA_SUCCESS;
}
EMU_API(cuMemGetAddressRange, 3020, CUdeviceptr* base, size_t* bytes, CUdeviceptr address) {
  Lock lock(mutex());
  Allocation* a = owner_of(address);
  if (!a) return CUDA_ERROR_NOT_FOUND;
  if (base) *base = a->base;
  if (bytes) *bytes = a->bytes;
  return CUDA_SUCCESS;
}

// ---- pools ----------------------------------------------------------------------------------------------------------
static CUmemoryPool handle_of(Pool& pool) { return reinterpret_cast<CUmemoryPool>(&pool); }
static Pool& pool_at(const CUmemLocation& location) {
  return location.type == CU_MEM_LOCATION_TYPE_DEVICE ? device_pool() : host_pool();
}
EMU_API(cuDeviceGetDefaultMemPool, 11020, CUmemoryPool* pool, CUdevice) {
  *pool = handle_of(device_pool());
  return CUDA_SUCCESS;
}
EMU_API(cuDeviceGetMemPool, 11020, CUmemoryPool* pool, CUdevice) {
  *pool = handle_of(device_pool());
  return CUDA_SUCCESS;
}
EMU_API(cuMemGetMemPool, 13000, CUmemoryPool* pool, CUmemLocation* location, int) {
  *pool = handle_of(pool_at(*location));
  return CUDA_SUCCESS;
}
EMU_API(cuMemGetDefaultMemPool, 13000, CUmemoryPool* pool, CUmemLocation* location, int) {
  *pool = handle_of(pool_at(*location));
  return CUDA_SUCCESS;
}
EMU_API(cuMemPoolCreate, 11020, CUmemoryPool* pool, const CUmemPoolProps* properties) {
  *pool = handle_of(*new Pool{properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE});
  return CUDA_SUCCESS;
}
EMU_API(cuMemPoolDestroy, 11020, CUmemoryPool) { return CUDA_SUCCESS; }  // kept: its allocations still name it
EMU_API(cuMemPoolSetAttribute, 11020, CUmemoryPool pool, int attribute, void* value) {
  auto& p = *reinterpret_cast<Pool*>(pool);
  if (attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD) p.release_threshold = *static_cast<uint64_t*>(value);
  if (attribute == CU_MEMPOOL_ATTR_USED_MEM_HIGH) p.high = p.used;
  return CUDA_SUCCESS;
}
EMU_API(cuMemPoolGetAttribute, 11020, CUmemoryPool pool, int attribute, void* value) {
  Lock lock(mutex());
  auto& p = *reinterpret_cast<Pool*>(pool);
  switch (attribute) {
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: *static_cast<uint64_t*>(value) = p.release_threshold; break;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT: *static_cast<uint64_t*>(value) = p.used; break;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH: *static_cast<uint64_t*>(value) = p.high; break;
    default:
      if (attribute > CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES) return CUDA_ERROR_NOT_SUPPORTED;
      *static_cast<int*>(value) = 1;
  }
  return CUDA_SUCCESS;
}
EMU_API(cuMemPoolTrimTo, 11020, CUmemoryPool, size_t) { return CUDA_SUCCESS; }
EMU_API(cuMemPoolSetAccess, 11020, CUmemoryPool, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }
EMU_API(cuMemPoolGetAccess, 11020, int* flags, CUmemoryPool, CUmemLocation*) {
  *flags = 3;  // CU_MEM_ACCESS_FLAGS_PROT_READWRITE
  return CUDA_SUCCESS;
}

// ---- pointers -------------------------------------------------------------------------------------------------------
static void pointer_attribute(int attribute, void* value, uintptr_t address) {
  Allocation* a = owner_of(address);
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *static_cast<unsigned*>(value) = !a ? 0 : a->host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
      break;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER: *static_cast<uintptr_t*>(value) = a && a->host ? address : 0; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *static_cast<uintptr_t*>(value) = a ? address : 0; break;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID: *static_cast<uint64_t*>(value) = a ? a->serial : 0; break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *static_cast<uintptr_t*>(value) = a ? a->base : 0; break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *static_cast<size_t*>(value) = a ? a->bytes : 0; break;
    case CU_POINTER_ATTRIBUTE_CONTEXT: *static_cast<void**>(value) = nullptr; break;
    default: *static_cast<int*>(value) = 0;
  }
}
EMU_API(cuPointerGetAttribute, 4000, void* value, int attribute, CUdeviceptr address) {
  Lock lock(mutex());
  if (!owner_of(address)) return CUDA_ERROR_INVALID_VALUE;
  pointer_attribute(attribute, value, address);
  return CUDA_SUCCESS;
}
EMU_API(cuPointerGetAttributes, 7000, unsigned n, int* attributes, void** values, CUdeviceptr address) {
  Lock lock(mutex());
  for (unsigned i = 0; i < n; ++i) pointer_attribute(attributes[i], values[i], address);
  return CUDA_SUCCESS;
}

}  // namespace emu
