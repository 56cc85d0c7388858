// How an entry point of the driver is written, and what happens around each call.
//
//   EMU_API(cuStreamQuery, 2000, CUstream stream) { ... return CUDA_SUCCESS; }
//
// defines and registers it under the version that cuGetProcAddress compares. Around every call: it is counted, traced
// when tracing is on, refused when a test asked for the nth call to fail, when the driver is not initialised or when the
// context is broken. `this_call()` takes the details that a body knows: direction, bytes, stream.
#pragma once
#include <string>

#include "state.h"

namespace emu {

struct ApiInfo {
  const char* name;
  int version;
  void* function;
};

struct CallRecord {
  std::string api, label;
  uint64_t thread = 0;
  int stream = -1;
  uint64_t bytes = 0;
  CUresult result = CUDA_SUCCESS;
};

class Call {
 public:
  explicit Call(const ApiInfo& info);
  ~Call();
  CUresult refusal() const { return refusal_; }
  CUresult finish(CUresult result);
  // Names what the call does; returns the error that a test asked for, if any. Locked.
  CUresult describe(const std::string& label, const Stream* stream, uint64_t bytes = 0);

 private:
  Call* outer_;
  const ApiInfo& info_;
  CUresult refusal_ = CUDA_SUCCESS;
  long record_ = -1;
};
Call& this_call();

template <auto Function, ApiInfo* Info>
struct Wrapped;
template <class... Args, CUresult (*Function)(Args...), ApiInfo* Info>
struct Wrapped<Function, Info> {
  static CUresult call(Args... args) {
    Call call(*Info);
    if (call.refusal()) return call.finish(call.refusal());
    return call.finish(Function(args...));
  }
};

void register_api(const ApiInfo&);
struct Registration {
  explicit Registration(const ApiInfo& info) { register_api(info); }
};

#define EMU_API_AS(identifier, name, version, ...)                                       \
  static CUresult identifier(__VA_ARGS__);                                               \
  extern ApiInfo info_##identifier;                                                      \
  ApiInfo info_##identifier{#name, version, nullptr};                                    \
  static const Registration registered_##identifier{                                     \
      (info_##identifier.function =                                                      \
           reinterpret_cast<void*>(&Wrapped<&identifier, &info_##identifier>::call),     \
       info_##identifier)};                                                              \
  static CUresult identifier(__VA_ARGS__)
#define EMU_API(name, version, ...) EMU_API_AS(emu_##name, name, version, __VA_ARGS__)

// ---- what tests set and read (control.cpp exports it) ------------------------------------------------------------
struct Fault {
  std::string pattern;  // an entry point, or a label or a prefix of one ("copy", "copy.d2h", "kernel:softmax")
  long countdown;
  CUresult code;
};
struct Finding {
  std::string kind, operation, where, message;
  uint64_t count = 1;
};
struct Control {
  std::map<std::string, uint64_t> counts;
  bool tracing = false;
  std::vector<CallRecord> trace;
  std::vector<Fault> call_faults, run_faults;
  std::map<std::string, double> delays;  // seconds by label pattern
  std::vector<Finding> findings;
  bool checked = false;
  unsigned thread_order = 0;  // 0 ascending, 1 descending, else a seed
  int workers = 1;
  double patience = 120;      // seconds
  std::string kernel_dir, builder;  // where PTX and kernel objects lie; the command that builds one
  void (*name_thread)(char* name, size_t room) = nullptr;
};
Control& control();
bool label_matches(const std::string& label, const std::string& pattern);
CUresult take_fault(std::vector<Fault>&, const std::string& label);  // locked
std::mutex& leaf_mutex();  // guards findings and operation labels; no other lock is taken under it
void report(Finding);
std::string thread_name(uint64_t thread);                            // locked

}  // namespace emu
