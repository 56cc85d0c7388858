// Modules, kernels and launches.
//
// Rules:
//  * PTX lies in <kernel_dir>/<hash of the PTX>/module.ptx. `emu_register` says which of them a cubin stands for; different PTX
//    may give equal cubins (masks of shuffles leave no trace), so the latest registration counts.
//  * A kernel's shared object, <hash of name>.so in the same folder, is built by the builder command when the kernel is first
//    asked for, and found there from then on.
//  * Module-scope variables are device memory of the loaded library, shared by its kernels.
#include <cxxabi.h>
#include <dlfcn.h>
#include <elf.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>

#include "api.h"
#include "grid.h"

namespace emu {

constexpr int kDefaultShared = 48 << 10;
constexpr int kMaxShared = 163 << 10;

struct KernelHandle;
struct Library {
  std::string folder;
  std::map<std::string, KernelHandle*> kernels;
  std::map<std::string, Allocation*> globals;
};
struct KernelHandle {
  Library* library;
  const Kernel* kernel;
  std::string label;
  std::vector<char*> globals;
  int max_dynamic_shared;
};

// ---- images -------------------------------------------------------------------------------------------------------
static std::string hex(uint64_t v) {
  char text[20];
  snprintf(text, sizeof text, "%016lx", (unsigned long)v);
  return text;
}
static uint64_t fnv1a(const void* data, size_t bytes) {
  uint64_t h = 14695981039346656037ull;
  for (size_t i = 0; i < bytes; ++i) h = (h ^ static_cast<const unsigned char*>(data)[i]) * 1099511628211ull;
  return h;
}
static bool is_elf(const void* image) { return !memcmp(image, ELFMAG, SELFMAG); }
static bool is_ptx(const void* image) {
  auto* text = static_cast<const char*>(image);
  return !strncmp(text, "//", 2) || !strncmp(text, ".version", 8);
}
static size_t elf_bytes(const void* image) {
  auto* bytes = static_cast<const char*>(image);
  Elf64_Ehdr header;
  memcpy(&header, bytes, sizeof header);
  size_t end = std::max(header.e_shoff + size_t(header.e_shnum) * header.e_shentsize,
                        header.e_phoff + size_t(header.e_phnum) * header.e_phentsize);
  for (int i = 0; i < header.e_shnum; ++i) {
    Elf64_Shdr section;
    memcpy(&section, bytes + header.e_shoff + size_t(i) * header.e_shentsize, sizeof section);
    if (section.sh_type != SHT_NOBITS) end = std::max<size_t>(end, section.sh_offset + section.sh_size);
  }
  return end;
}
static std::map<uint64_t, std::string>& registered() {  // the folder of a cubin's PTX, by the cubin's hash
  static auto& folders = *new std::map<uint64_t, std::string>;
  return folders;
}
void register_cubin(const void* cubin, const std::string& folder) {
  registered()[fnv1a(cubin, elf_bytes(cubin))] = folder;
}

static bool exists(const std::string& path) {
  struct stat unused;
  return !stat(path.c_str(), &unused);
}

// The folder of an image's PTX, or nothing.
static std::string folder_of(const void* image) {
  if (is_elf(image)) return registered()[fnv1a(image, elf_bytes(image))];
  std::string text = static_cast<const char*>(image), folder = control().kernel_dir + "/" + hex(fnv1a(image, text.size()));
  mkdir(folder.c_str(), 0777);
  std::ofstream(folder + "/module.ptx") << text;
  return folder;
}

static CUresult load(Library** out, const void* image) {
  Lock lock(mutex());
  if (CUresult fault = this_call().describe("module.load", nullptr)) return fault;
  if (!is_elf(image) && !is_ptx(image)) return explain(CUDA_ERROR_INVALID_IMAGE, "neither a cubin nor PTX");
  std::string folder = folder_of(image);
  if (folder.empty())
    return explain(CUDA_ERROR_NO_BINARY_FOR_GPU,
                   "no PTX is registered for this cubin: was it compiled before the hook was installed, or not for sm_80?");
  *out = new Library{folder, {}, {}};
  return CUDA_SUCCESS;
}

static CUresult unload(Library* library) {
  Lock lock(mutex());
  synchronize_all(lock);
  for (auto& each : library->globals) release(each.second);
  for (auto& each : library->kernels) delete each.second;
  delete library;
  return CUDA_SUCCESS;
}

// ---- kernels --------------------------------------------------------------------------------------------------------
static std::string read_file(const std::string& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

static std::string kernel_label(const char* name) {
  int status = 0;
  char* full = abi::__cxa_demangle(name, nullptr, nullptr, &status);
  if (status) return std::string("kernel:") + name;
  std::string text = full;
  free(full);
  text = text.substr(0, text.rfind('('));
  if (text.compare(0, 5, "void ") == 0) text = text.substr(5);
  return "kernel:" + text;
}

static Allocation* global_of(Library& library, const GlobalVariable& variable) {
  Allocation*& a = library.globals[variable.name];
  if (a) return a;
  a = allocate(variable.bytes, false, nullptr);
  if (!a) return nullptr;
  a->tracks_initialisation = false;
  if (variable.initial)
    memcpy(reinterpret_cast<void*>(a->base), variable.initial, variable.bytes);
  else
    memset(reinterpret_cast<void*>(a->base), 0, variable.bytes);
  return a;
}

// Builds the kernel if need be. Unlocked: it may take seconds.
static const Kernel* open_kernel(const std::string& folder, const char* name, std::string& problem) {
  std::string stem = folder + "/" + hex(fnv1a(name, strlen(name)));
  if (!exists(stem + ".so")) {
    std::string command = control().builder + " '" + folder + "' '" + name + "' '" + stem + "'";
    if (system(command.c_str()) != 0 || !exists(stem + ".so")) {
      problem = exists(stem + ".err") ? read_file(stem + ".err") : "could not run: " + command;
      return nullptr;
    }
  }
  void* object = dlopen((stem + ".so").c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!object) {
    problem = dlerror();
    return nullptr;
  }
  return static_cast<const Kernel*>(dlsym(object, "emu_kernel"));
}

static CUresult get_kernel(KernelHandle** out, Library* library, const char* name) {
  {
    Lock lock(mutex());
    auto it = library->kernels.find(name);
    if (it != library->kernels.end()) return *out = it->second, CUDA_SUCCESS;
  }
  std::string problem;
  const Kernel* kernel = open_kernel(library->folder, name, problem);
  Lock lock(mutex());
  if (!kernel) {
    bool missing = problem.compare(0, 8, "no entry") == 0;
    if (!missing) fprintf(stderr, "emucuda: %s\n", problem.c_str());
    return explain(missing ? CUDA_ERROR_NOT_FOUND : CUDA_ERROR_INVALID_IMAGE, problem);
  }
  auto* handle = new KernelHandle{library, kernel, kernel_label(name), {}, 0};
  handle->max_dynamic_shared = std::max(0, kDefaultShared - kernel->static_shared_bytes);
  for (int i = 0; i < kernel->n_globals; ++i) {
    Allocation* a = global_of(*library, kernel->globals[i]);
    if (!a) return CUDA_ERROR_OUT_OF_MEMORY;
    handle->globals.push_back(reinterpret_cast<char*>(a->base));
  }
  library->kernels[name] = *out = handle;
  return CUDA_SUCCESS;
}

template <class Handle>
static Library* library_of(Handle h) { return reinterpret_cast<Library*>(h); }
template <class Handle>
static KernelHandle* kernel_of(Handle h) { return reinterpret_cast<KernelHandle*>(h); }

EMU_API(cuLibraryLoadData, 12000, CUlibrary* out, const void* image, void*, void**, unsigned, void*, void**, unsigned) {
  return load(reinterpret_cast<Library**>(out), image);
}
EMU_API(cuLibraryUnload, 12000, CUlibrary library) { return unload(library_of(library)); }
EMU_API(cuLibraryGetKernel, 12000, CUkernel* out, CUlibrary library, const char* name) {
  return get_kernel(reinterpret_cast<KernelHandle**>(out), library_of(library), name);
}
EMU_API(cuKernelGetFunction, 12000, CUfunction* out, CUkernel kernel) {
  *out = reinterpret_cast<CUfunction>(kernel);
  return CUDA_SUCCESS;
}
EMU_API(cuKernelGetLibrary, 12050, CUlibrary* out, CUkernel kernel) {
  *out = reinterpret_cast<CUlibrary>(kernel_of(kernel)->library);
  return CUDA_SUCCESS;
}
EMU_API(cuKernelGetName, 12030, const char** name, CUkernel kernel) {
  *name = kernel_of(kernel)->kernel->name;
  return CUDA_SUCCESS;
}
EMU_API(cuModuleLoadData, 2000, CUmodule* out, const void* image) {
  return load(reinterpret_cast<Library**>(out), image);
}
EMU_API(cuModuleLoadDataEx, 2010, CUmodule* out, const void* image, unsigned, void*, void**) {
  return load(reinterpret_cast<Library**>(out), image);
}
EMU_API(cuModuleUnload, 2000, CUmodule module) { return unload(library_of(module)); }
EMU_API(cuModuleGetFunction, 2000, CUfunction* out, CUmodule module, const char* name) {
  return get_kernel(reinterpret_cast<KernelHandle**>(out), library_of(module), name);
}
static CUresult get_global(CUdeviceptr* address, size_t* bytes, Library* library, const char* name) {
  Lock lock(mutex());
  auto it = library->globals.find(name);
  if (it == library->globals.end())
    return explain(CUDA_ERROR_NOT_FOUND, "no kernel got so far uses this variable, so it does not exist yet");
  if (address) *address = it->second->base;
  if (bytes) *bytes = it->second->bytes;
  return CUDA_SUCCESS;
}
EMU_API(cuLibraryGetGlobal, 12000, CUdeviceptr* address, size_t* bytes, CUlibrary library, const char* name) {
  return get_global(address, bytes, library_of(library), name);
}
EMU_API(cuModuleGetGlobal, 3020, CUdeviceptr* address, size_t* bytes, CUmodule module, const char* name) {
  return get_global(address, bytes, library_of(module), name);
}

// ---- attributes -------------------------------------------------------------------------------------------------------
static CUresult get_attribute(int* value, int attribute, const KernelHandle& k) {
  switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = k.kernel->max_threads; break;
    case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: *value = k.kernel->static_shared_bytes; break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = 32; break;  // not modelled
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION: *value = 80; break;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: *value = k.max_dynamic_shared; break;
    default: *value = 0;
  }
  return CUDA_SUCCESS;
}
static CUresult set_attribute(int attribute, int value, KernelHandle& k) {
  if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_SUCCESS;
  if (value + k.kernel->static_shared_bytes > kMaxShared) return CUDA_ERROR_INVALID_VALUE;
  k.max_dynamic_shared = value;
  return CUDA_SUCCESS;
}
EMU_API(cuKernelGetAttribute, 12000, int* value, int attribute, CUkernel kernel, CUdevice) {
  return get_attribute(value, attribute, *kernel_of(kernel));
}
EMU_API(cuFuncGetAttribute, 2020, int* value, int attribute, CUfunction function) {
  return get_attribute(value, attribute, *kernel_of(function));
}
EMU_API(cuKernelSetAttribute, 12000, int attribute, int value, CUkernel kernel, CUdevice) {
  return set_attribute(attribute, value, *kernel_of(kernel));
}
EMU_API(cuFuncSetAttribute, 9000, CUfunction function, int attribute, int value) {
  return set_attribute(attribute, value, *kernel_of(function));
}
static CUresult parameter_info(const KernelHandle& k, size_t i, size_t* offset, size_t* bytes) {
  if (i >= size_t(k.kernel->n_parameters)) return CUDA_ERROR_INVALID_VALUE;
  if (offset) *offset = size_t(k.kernel->parameter_offset[i]);
  if (bytes) *bytes = size_t(k.kernel->parameter_bytes[i]);
  return CUDA_SUCCESS;
}
EMU_API(cuKernelGetParamInfo, 12040, CUkernel kernel, size_t i, size_t* offset, size_t* bytes) {
  return parameter_info(*kernel_of(kernel), i, offset, bytes);
}
EMU_API(cuFuncGetParamInfo, 12040, CUfunction function, size_t i, size_t* offset, size_t* bytes) {
  return parameter_info(*kernel_of(function), i, offset, bytes);
}
EMU_API(cuOccupancyMaxActiveBlocksPerMultiprocessor, 6050, int* n, CUfunction, int block, size_t) {
  *n = 2048 / std::max(block, 1);
  return CUDA_SUCCESS;
}
EMU_API(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, 7000, int* n, CUfunction, int block, size_t, unsigned) {
  *n = 2048 / std::max(block, 1);
  return CUDA_SUCCESS;
}

// ---- launch -----------------------------------------------------------------------------------------------------------
static CUresult check_launch(const KernelHandle& k, Dim grid, Dim block, unsigned dynamic_shared) {
  size_t threads = size_t(block.x) * block.y * block.z;
  if (!threads || !grid.x || !grid.y || !grid.z) return explain(CUDA_ERROR_INVALID_VALUE, "an empty grid or block");
  if (grid.y > 65535 || grid.z > 65535) return explain(CUDA_ERROR_INVALID_VALUE, "grid y or z above 65535");
  if (threads > 1024) return explain(CUDA_ERROR_INVALID_VALUE, "more than 1024 threads a block");
  if (threads > size_t(k.kernel->max_threads))
    return explain(CUDA_ERROR_INVALID_VALUE, "more threads a block than __launch_bounds__ allows");
  if (dynamic_shared > unsigned(k.max_dynamic_shared))
    return explain(CUDA_ERROR_INVALID_VALUE, "more dynamic shared memory than MAX_DYNAMIC_SHARED_SIZE_BYTES allows");
  return CUDA_SUCCESS;
}

static CUresult launch(KernelHandle* k, Dim grid, Dim block, unsigned dynamic_shared, CUstream handle, void** arguments,
                       void** extra) {
  Lock lock(mutex());
  Stream* stream = stream_of(handle);
  if (CUresult fault = this_call().describe(k->label, stream)) return fault;
  if (CUresult error = check_launch(*k, grid, block, dynamic_shared)) return error;
  if (extra && !arguments) return explain(CUDA_ERROR_NOT_SUPPORTED, "packed launch parameters are not emulated");
  GridLaunch g{k->kernel, grid, block, dynamic_shared, {}, k->globals};
  const Kernel& kernel = *k->kernel;
  int n = kernel.n_parameters;
  g.parameters.resize(n ? size_t(kernel.parameter_offset[n - 1] + kernel.parameter_bytes[n - 1]) : 0);
  for (int i = 0; i < n; ++i)
    memcpy(&g.parameters[size_t(kernel.parameter_offset[i])], arguments[i], size_t(kernel.parameter_bytes[i]));
  auto shared = std::make_shared<GridLaunch>(std::move(g));
  enqueue(stream, k->label, [shared](const Actor& actor) { return run_grid(*shared, actor); });
  return CUDA_SUCCESS;
}
EMU_API(cuLaunchKernel, 4000, CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
        unsigned bz, unsigned dynamic_shared, CUstream stream, void** arguments, void** extra) {
  return launch(kernel_of(function), {gx, gy, gz}, {bx, by, bz}, dynamic_shared, stream, arguments, extra);
}
EMU_API(cuLaunchKernelEx, 11060, const CUlaunchConfig* c, CUfunction function, void** arguments, void** extra) {
  return launch(kernel_of(function), {c->gridDimX, c->gridDimY, c->gridDimZ}, {c->blockDimX, c->blockDimY, c->blockDimZ},
                c->sharedMemBytes, c->hStream, arguments, extra);
}

}  // namespace emu
