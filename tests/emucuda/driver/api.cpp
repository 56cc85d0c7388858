// The table of entry points: cuGetProcAddress, stubs that name themselves, and the bookkeeping around each call.
#include "api.h"

#include <pthread.h>

#include <cstdio>
#include <cstring>
#include <ctime>
#include <utility>

namespace emu {

static std::vector<ApiInfo>& table() {
  static auto& entries = *new std::vector<ApiInfo>;
  return entries;
}
void register_api(const ApiInfo& info) { table().push_back(info); }

std::mutex& mutex() {
  static auto& m = *new std::mutex;
  return m;
}
std::condition_variable& progress() {
  static auto& c = *new std::condition_variable;
  return c;
}
Control& control() {
  static auto& c = *new Control;
  return c;
}
ContextState& context() {
  static auto& c = *new ContextState;
  return c;
}
double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return double(t.tv_sec) + double(t.tv_nsec) * 1e-9;
}

// "copy" matches copy.d2h, "kernel" and "kernel:mv" match kernel:mv<4>, but "cop" matches nothing.
bool label_matches(const std::string& label, const std::string& pattern) {
  if (label.compare(0, pattern.size(), pattern) != 0) return false;
  return label.size() == pattern.size() || strchr(".:<", label[pattern.size()]);
}

CUresult take_fault(std::vector<Fault>& faults, const std::string& label) {
  for (auto& fault : faults)
    if (label_matches(label, fault.pattern) && --fault.countdown == 0) return fault.code;
  return CUDA_SUCCESS;
}

void poison_context(const Failure& failure) {
  if (!context().sticky) context().sticky = failure.code;
  explain(failure.code, failure.message);
}

CUresult explain(CUresult code, const std::string& message) {
  context().explained = code;
  context().last_error = message;
  return code;
}

std::mutex& leaf_mutex() {
  static auto& m = *new std::mutex;
  return m;
}

void report(Finding finding) {
  Lock leaf(leaf_mutex());
  for (auto& known : control().findings)
    if (known.kind == finding.kind && known.operation == finding.operation && known.where == finding.where) {
      ++known.count;
      return;
    }
  if (control().findings.size() < 1000) control().findings.push_back(std::move(finding));
}

// ---- thread names: asked for once per thread, before any lock is taken (the callback takes Python's) ------------
static std::map<uint64_t, std::string>& thread_names() {
  static auto& names = *new std::map<uint64_t, std::string>;
  return names;
}
std::string thread_name(uint64_t thread) {
  auto it = thread_names().find(thread);
  return it == thread_names().end() ? "thread-" + std::to_string(thread) : it->second;
}
static thread_local bool thread_is_named = false;
static void name_this_thread() {
  auto ask = control().name_thread;
  if (thread_is_named || !ask) return;
  thread_is_named = true;
  char name[64] = "";
  ask(name, sizeof name);
  Lock lock(mutex());
  thread_names()[pthread_self()] = name;
}

// ---- one call -----------------------------------------------------------------------------------------------------
static thread_local Call* current_call = nullptr;
Call& this_call() { return *current_call; }

// Releasing works, too, so that a test can tell a leak from what a broken context kept.
static bool works_on_broken_context(const char* name) {
  static const char* const kAlways[] = {
      "cuInit",          "cuDriverGetVersion", "cuGetErrorString",   "cuGetErrorName",      "cuCtxGetCurrent",
      "cuCtxSetCurrent", "cuMemFree",          "cuMemFreeAsync",     "cuMemFreeHost",       "cuEventDestroy",
      "cuStreamDestroy", "cuGraphDestroy",     "cuGraphExecDestroy", "cuUserObjectRelease", "cuLibraryUnload",
      "cuModuleUnload",  "cuMemPoolDestroy",   "cuDevicePrimaryCtxRelease"};
  for (auto* each : kAlways)
    if (!strcmp(each, name)) return true;
  return false;
}

Call::Call(const ApiInfo& info) : outer_(current_call), info_(info) {
  name_this_thread();
  current_call = this;
  Lock lock(mutex());
  auto& state = control();
  ++state.counts[info.name];
  if (state.tracing) {
    record_ = long(state.trace.size());
    CallRecord record;
    record.api = info.name;
    record.thread = pthread_self();
    state.trace.push_back(std::move(record));
  }
  refusal_ = take_fault(state.call_faults, info.name);
  if (refusal_ || works_on_broken_context(info.name)) return;
  refusal_ = !context().initialised ? CUDA_ERROR_NOT_INITIALIZED : context().sticky;
}

Call::~Call() { current_call = outer_; }

CUresult Call::finish(CUresult result) {
  if (record_ >= 0) {
    Lock lock(mutex());
    if (size_t(record_) < control().trace.size()) control().trace[size_t(record_)].result = result;
  }
  return result;
}

CUresult Call::describe(const std::string& label, const Stream* stream, uint64_t bytes) {
  auto& state = control();
  ++state.counts[label];
  if (bytes) state.counts[label + ".bytes"] += bytes;
  if (record_ >= 0 && size_t(record_) < state.trace.size()) {
    auto& record = state.trace[size_t(record_)];
    record.label = label;
    record.stream = stream ? stream->id : -1;
    record.bytes = bytes;
  }
  return take_fault(state.call_faults, label);
}

// ---- entry points that nobody needed yet ----------------------------------------------------------------------------
constexpr int kStubs = 800;
static std::vector<std::string>& stub_names() {
  static auto& names = *new std::vector<std::string>;
  return names;
}

static CUresult unimplemented(int index) {
  Lock lock(mutex());
  const std::string& name = stub_names()[size_t(index)];
  ++control().counts["unimplemented:" + name];
  fprintf(stderr, "emucuda: %s is not implemented\n", name.c_str());
  return explain(CUDA_ERROR_NOT_SUPPORTED, name + " is not implemented by the emulated driver");
}

template <int Index>
static CUresult stub() {
  return unimplemented(Index);
}

template <int... Index>
static void* stub_at(size_t i, std::integer_sequence<int, Index...>) {
  static void* const stubs[] = {reinterpret_cast<void*>(&stub<Index>)...};
  return stubs[i];
}

static void* make_stub(const char* name) {
  Lock lock(mutex());
  auto& names = stub_names();
  for (size_t i = 0; i < names.size(); ++i)
    if (names[i] == name) return stub_at(i, std::make_integer_sequence<int, kStubs>());
  if (names.size() == kStubs) return nullptr;
  names.push_back(name);
  return stub_at(names.size() - 1, std::make_integer_sequence<int, kStubs>());
}

static void* find_api(const char* name, int version) {
  const ApiInfo* best = nullptr;
  for (auto& entry : table())
    if (!strcmp(entry.name, name) && entry.version <= version && (!best || entry.version > best->version))
      best = &entry;
  return best ? best->function : nullptr;
}

}  // namespace emu

// The one symbol by which cuda.bindings finds everything else.
extern "C" __attribute__((visibility("default"))) CUresult cuGetProcAddress_v2(const char* name, void** function,
                                                                               int version, uint64_t /*flags*/,
                                                                               int* status) {
  if (!strcmp(name, "cuGetProcAddress"))
    *function = reinterpret_cast<void*>(&cuGetProcAddress_v2);
  else if (!(*function = emu::find_api(name, version)))
    *function = emu::make_stub(name);
  if (status) *status = 0;  // CU_GET_PROC_ADDRESS_SUCCESS
  return CUDA_SUCCESS;
}
