// What tests call (through control.py): settings, faults, holds, and reports as JSON.
#include <cstdio>
#include <cstring>

#include "api.h"
#include "block.h"
#include "grid.h"
#include "shadow.h"

#define EMU_EXPORT extern "C" __attribute__((visibility("default")))

namespace emu {

static std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (char c : text) {
    char escaped[8];
    if (c == '"' || c == '\\')
      out += '\\', out += c;
    else if (static_cast<unsigned char>(c) < 32)
      snprintf(escaped, sizeof escaped, "\\u%04x", c), out += escaped;
    else
      out += c;
  }
  return out + "\"";
}

template <class Items, class Body>
static std::string list(const Items& items, Body body) {
  std::string out = "[";
  for (auto& item : items) out += (out.size() > 1 ? "," : "") + body(item);
  return out + "]";
}

// The text stays valid until this thread asks again.
static const char* keep(std::string text) {
  static thread_local std::string kept;
  kept = std::move(text);
  return kept.c_str();
}

static std::string describe_stream(const std::pair<const int, Stream*>& each) {
  const Stream& s = *each.second;
  return "{\"id\":" + std::to_string(s.id) + ",\"queued\":" + std::to_string(s.queue.size() + size_t(s.running)) +
         ",\"done\":" + std::to_string(s.operations_done) + ",\"held\":" + (s.budget == 0 ? "true" : "false") +
         ",\"closing\":" + (s.closing ? "true" : "false") + "}";
}

static std::string describe_call(const CallRecord& r) {
  return "{\"api\":" + quoted(r.api) + ",\"label\":" + quoted(r.label) + ",\"thread\":" + quoted(thread_name(r.thread)) +
         ",\"stream\":" + std::to_string(r.stream) + ",\"bytes\":" + std::to_string(r.bytes) +
         ",\"result\":" + std::to_string(r.result) + "}";
}

static std::string describe_finding(const Finding& f) {
  return "{\"kind\":" + quoted(f.kind) + ",\"operation\":" + quoted(f.operation) + ",\"where\":" + quoted(f.where) +
         ",\"message\":" + quoted(f.message) + ",\"count\":" + std::to_string(f.count) + "}";
}

}  // namespace emu

using namespace emu;

// ---- reports --------------------------------------------------------------------------------------------------------------
EMU_EXPORT const char* emu_counts() {
  Lock lock(mutex());
  std::string body = list(control().counts, [](auto& each) { return quoted(each.first) + ":" + std::to_string(each.second); });
  return keep("{" + body.substr(1, body.size() - 2) + "}");
}
EMU_EXPORT const char* emu_trace() {
  Lock lock(mutex());
  return keep(list(control().trace, describe_call));
}
EMU_EXPORT const char* emu_findings() {
  Lock leaf(leaf_mutex());
  return keep(list(control().findings, describe_finding));
}
EMU_EXPORT const char* emu_streams() {
  Lock lock(mutex());
  return keep(list(streams(), describe_stream));
}
EMU_EXPORT const char* emu_live() {
  Lock lock(mutex());
  size_t device = 0, pinned = 0, open = 0;
  for (auto& each : memory().live) ++(each.second->host ? pinned : device);
  for (auto& each : streams()) open += each.first != 0 && !each.second->closing;
  char text[320];
  snprintf(text, sizeof text,
           "{\"device_allocations\":%zu,\"pinned_allocations\":%zu,\"device_bytes\":%zu,\"peak_device_bytes\":%zu,"
           "\"streams\":%zu,\"events\":%zu,\"graphs\":%zu}",
           device, pinned, memory().used, memory().high, open, live_events(), live_graphs());
  return keep(text);
}
EMU_EXPORT int emu_context_error() {
  Lock lock(mutex());
  return context().sticky;
}
EMU_EXPORT const char* emu_last_error() {
  Lock lock(mutex());
  return keep(context().last_error);
}

// ---- settings -------------------------------------------------------------------------------------------------------------
// Forgets counts, trace, findings, faults, delays, holds and captures, and mends the context. Does not wait.
EMU_EXPORT void emu_reset() {
  Lock lock(mutex());
  auto& c = control();
  c.counts.clear();
  c.trace.clear();
  c.call_faults.clear();
  c.run_faults.clear();
  c.delays.clear();
  {
    Lock leaf(leaf_mutex());
    c.findings.clear();
  }
  context().sticky = context().explained = CUDA_SUCCESS;
  context().last_error.clear();
  for (auto& each : streams()) each.second->budget = -1;
  wake_all_streams();
  abandon_captures();
}
EMU_EXPORT void emu_forget_findings() {
  Lock leaf(leaf_mutex());
  control().findings.clear();
}
EMU_EXPORT void emu_forget_counts() {
  Lock lock(mutex());
  control().counts.clear();
  control().trace.clear();
}
EMU_EXPORT void emu_set_tracing(int on) {
  Lock lock(mutex());
  control().tracing = on;
}
// What was written while checking was off is unknown, so nothing that was allocated so far counts as uninitialised.
EMU_EXPORT void emu_set_checked(int on) {
  Lock lock(mutex());
  synchronize_all(lock);
  control().checked = on;
  for (auto& each : memory().live) {
    drop_shadow(*each.second);
    each.second->tracks_initialisation = false;
  }
}
EMU_EXPORT void emu_set_thread_order(unsigned order) { control().thread_order = order; }
EMU_EXPORT void emu_set_patience(double seconds) { control().patience = seconds; }
EMU_EXPORT void emu_set_workers(int n) { control().workers = n; }
EMU_EXPORT void emu_set_memory(uint64_t bytes) {
  Lock lock(mutex());
  memory().total = bytes;
}
EMU_EXPORT void emu_set_delay(const char* pattern, double seconds) {
  Lock lock(mutex());
  control().delays[pattern] = seconds;
}
EMU_EXPORT void emu_set_thread_namer(void (*namer)(char*, size_t)) {
  Lock lock(mutex());
  control().name_thread = namer;
}
EMU_EXPORT void emu_set_kernel_builder(const char* folder, const char* command) {
  Lock lock(mutex());
  control().kernel_dir = folder;
  control().builder = command;
}

// ---- faults and holds -------------------------------------------------------------------------------------------------------
EMU_EXPORT void emu_fail_call(const char* pattern, long nth, int code) {
  Lock lock(mutex());
  control().call_faults.push_back({pattern, nth, code});
}
EMU_EXPORT void emu_fail_run(const char* pattern, long nth, int code) {
  Lock lock(mutex());
  control().run_faults.push_back({pattern, nth, code});
}
// Operations that a stream may still start; 0 holds it, -1 lets it run. Takes an id. False: there is no such stream.
EMU_EXPORT int emu_set_budget(int stream, long operations) {
  Lock lock(mutex());
  auto it = streams().find(stream);
  if (it == streams().end()) return 0;
  it->second->budget = operations;
  it->second->wake.notify_one();
  return 1;
}
EMU_EXPORT int emu_stream_id(void* handle) {
  Lock lock(mutex());
  return stream_of(static_cast<CUstream>(handle))->id;
}
// Waits until all streams have run dry, without putting anything in order: a test that looks must not hide a race.
EMU_EXPORT void emu_settle() {
  Lock lock(mutex());
  VectorClock before = host_clock();
  synchronize_all(lock);
  host_clock() = before;
}

// ---- memory as the host sees it -----------------------------------------------------------------------------------------------
// Tells the checker that the host reads or writes pinned memory now.
EMU_EXPORT void emu_host_access(uint64_t address, uint64_t bytes, int writes) {
  Lock lock(mutex());
  Allocation* a = owner_of(address);
  if (!a || address - a->base + bytes > a->bytes) return;
  ++host_clock().time[kHost];
  check_range({kHost, host_clock(), "the host"}, *a, address - a->base, bytes, writes ? kWrite : kRead);
}
// The folder that holds a cubin's PTX, as module.ptx.
EMU_EXPORT void emu_register(const void* cubin, const char* folder) {
  Lock lock(mutex());
  register_cubin(cubin, folder);
}
