// Initialisation, the one device, its primary context, and error texts.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "api.h"
#include "block.h"

namespace emu {

static int the_context;  // its address is the handle of the primary context
static thread_local CUcontext current_context = nullptr;
CUcontext primary_context() { return reinterpret_cast<CUcontext>(&the_context); }

static int compute_capability() {
  const char* chosen = getenv("EMUCUDA_CC");
  return chosen ? atoi(chosen) : 80;
}

EMU_API(cuInit, 2000, unsigned) {
  Lock lock(mutex());
  if (context().initialised) return CUDA_SUCCESS;
  context().initialised = true;
  if (const char* mib = getenv("EMUCUDA_MEMORY_MIB")) memory().total = size_t(atoll(mib)) << 20;
  start_streams();
  install_fault_handler();
  return CUDA_SUCCESS;
}
EMU_API(cuDriverGetVersion, 2020, int* version) {
  *version = 13050;
  return CUDA_SUCCESS;
}
EMU_API(cuDeviceGetCount, 2000, int* n) {
  *n = 1;
  return CUDA_SUCCESS;
}
EMU_API(cuDeviceGet, 2000, CUdevice* device, int ordinal) {
  *device = 0;
  return ordinal == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
EMU_API(cuDeviceGetName, 2000, char* name, int room, CUdevice) {
  snprintf(name, size_t(room), "Emulated GPU");
  return CUDA_SUCCESS;
}
EMU_API(cuDeviceGetUuid, 11040, CUuuid* uuid, CUdevice) {
  memset(uuid, 7, sizeof *uuid);
  return CUDA_SUCCESS;
}
EMU_API(cuDeviceTotalMem, 3020, size_t* bytes, CUdevice) {
  *bytes = memory().total;
  return CUDA_SUCCESS;
}

static int device_attribute(int attribute) {
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return compute_capability() / 10;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return compute_capability() % 10;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return 4;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return 32;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: return 2048;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: return 32;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X: return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: return 64;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: return 0x7fffffff;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y: return 65535;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: return 65535;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: return 48 << 10;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return 163 << 10;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: return 164 << 10;
    case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK: return 1 << 10;
    case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY: return 64 << 10;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: return 65536;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: return 65536;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: return 32 << 20;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: return 1500000;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: return 5000000;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: return 384;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: return 2;
    case CU_DEVICE_ATTRIBUTE_GPU_OVERLAP:
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HOST_MEMORY_POOLS_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM: return 1;
    default: return 0;
  }
}
EMU_API(cuDeviceGetAttribute, 2000, int* value, int attribute, CUdevice) {
  *value = device_attribute(attribute);
  return CUDA_SUCCESS;
}

// ---- context ------------------------------------------------------------------------------------------------------
EMU_API(cuDevicePrimaryCtxRetain, 7000, CUcontext* context, CUdevice) {
  *context = primary_context();
  return CUDA_SUCCESS;
}
EMU_API(cuDevicePrimaryCtxRelease, 11000, CUdevice) { return CUDA_SUCCESS; }
EMU_API(cuDevicePrimaryCtxGetState, 7000, CUdevice, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
EMU_API(cuCtxSetCurrent, 4000, CUcontext context) {
  current_context = context;
  return CUDA_SUCCESS;
}
EMU_API(cuCtxGetCurrent, 4000, CUcontext* context) {
  *context = current_context;
  return CUDA_SUCCESS;
}
EMU_API(cuCtxPushCurrent, 4000, CUcontext context) {
  current_context = context;
  return CUDA_SUCCESS;
}
EMU_API(cuCtxPopCurrent, 4000, CUcontext* context) {
  *context = current_context;
  current_context = nullptr;
  return CUDA_SUCCESS;
}
EMU_API(cuCtxGetDevice, 2000, CUdevice* device) {
  *device = 0;
  return current_context ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}
EMU_API_AS(ctx_get_device_v2, cuCtxGetDevice, 13000, CUdevice* device, CUcontext) {
  *device = 0;
  return CUDA_SUCCESS;
}
EMU_API(cuCtxGetId, 12000, CUcontext, unsigned long long* id) {
  *id = 1;
  return CUDA_SUCCESS;
}
EMU_API(cuCtxGetFlags, 7000, unsigned* flags) {
  *flags = 0;
  return CUDA_SUCCESS;
}
EMU_API(cuCtxGetLimit, 3010, size_t* value, int) {
  *value = 1024;
  return CUDA_SUCCESS;
}
EMU_API(cuCtxGetStreamPriorityRange, 5050, int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return CUDA_SUCCESS;
}
static CUresult context_synchronize() {
  Lock lock(mutex());
  if (CUresult fault = this_call().describe("sync.context", nullptr)) return fault;
  synchronize_all(lock);
  return context().sticky;
}
EMU_API(cuCtxSynchronize, 2000) { return context_synchronize(); }
EMU_API_AS(ctx_synchronize_v2, cuCtxSynchronize, 13000, CUcontext) { return context_synchronize(); }

// ---- error texts ----------------------------------------------------------------------------------------------------
struct ErrorText {
  CUresult code;
  const char *name, *text;
};
static const ErrorText kErrors[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for the device"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested"},
    {CUDA_ERROR_LAUNCH_TIMEOUT, "CUDA_ERROR_LAUNCH_TIMEOUT", "the launch timed out and was terminated"},
    {CUDA_ERROR_ASSERT, "CUDA_ERROR_ASSERT", "device-side assert triggered"},
    {CUDA_ERROR_MISALIGNED_ADDRESS, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"},
    {CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED",
     "the capture was not begun in this stream"},
    {CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED",
     "the capture has forked work that was not joined"},
    {CUDA_ERROR_CAPTURED_EVENT, "CUDA_ERROR_CAPTURED_EVENT",
     "operation not permitted on an event last recorded in a capturing stream"},
    {CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE, "CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE",
     "the graph update was not performed"},
    {CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};
static const ErrorText& error_text(CUresult code) {
  for (auto& each : kErrors)
    if (each.code == code) return each;
  return kErrors[sizeof kErrors / sizeof kErrors[0] - 1];
}
EMU_API(cuGetErrorName, 6000, CUresult code, const char** name) {
  *name = error_text(code).name;
  return CUDA_SUCCESS;
}
// The text of a failed launch carries what the checker found, so that it shows in the exception.
EMU_API(cuGetErrorString, 6000, CUresult code, const char** text) {
  static auto& detailed = *new std::map<std::string, bool>;  // keeps every text alive
  Lock lock(mutex());
  *text = error_text(code).text;
  if (code && code == context().explained)
    *text = detailed.emplace(std::string(*text) + ": " + context().last_error, true).first->first.c_str();
  return CUDA_SUCCESS;
}

}  // namespace emu
