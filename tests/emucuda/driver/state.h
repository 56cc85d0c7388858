// The state of the emulated driver, shared by its parts.
//
// Rules:
//  * One mutex (`mutex()`) guards everything here except a stream's running operation, which runs unlocked.
//  * Every stream has a thread that takes operations from its queue in order. `progress()` is notified after each.
//  * An operation knows its happens-before past as a vector clock, fixed when it is enqueued. The participants are the
//    streams and, as the last one, the host (all its threads together).
//  * State is allocated once and never destroyed: stream threads outlive static destructors.
#pragma once
#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda_types.h"

namespace emu {

using Lock = std::unique_lock<std::mutex>;
std::mutex& mutex();
std::condition_variable& progress();
double now();

// ---- happens-before -------------------------------------------------------------------------------------------
constexpr int kParticipants = 64;
constexpr int kHost = kParticipants - 1;
struct VectorClock {
  std::array<uint32_t, kParticipants> time{};
  void join(const VectorClock& other);
};

struct Failure {
  CUresult code = CUDA_SUCCESS;
  std::string message;
};

// Who runs an operation, as the checker sees it.
struct Actor {
  int participant = 0;
  VectorClock clock;
  std::string label;
};

// ---- memory ---------------------------------------------------------------------------------------------------
struct Shadow;  // what the checker remembers of an allocation; see shadow.h
struct Pool {
  bool host = false;
  size_t used = 0, high = 0;
  uint64_t release_threshold = 0;
};
struct Allocation {
  uintptr_t base = 0;
  size_t bytes = 0;
  bool host = false;
  Pool* pool = nullptr;
  uint64_t serial = 0;
  int born_on = 0;           // participant and time of a stream-ordered allocation
  uint32_t born_at = 0;
  bool tracks_initialisation = false;
  Shadow* shadow = nullptr;
};
Allocation* owner_of(uintptr_t address);                   // lock-free; null if no live allocation holds the page
Allocation* allocate(size_t bytes, bool host, Pool* pool);  // locked; null when the device is full
void release(Allocation*);                                  // locked
Pool& device_pool();
Pool& host_pool();
struct MemoryUse {
  size_t total = size_t(8) << 30, used = 0, high = 0;
  std::map<uint64_t, Allocation*> live;
  uint64_t serial = 0;
};
MemoryUse& memory();

// ---- streams and events -----------------------------------------------------------------------------------------
struct Completion {
  bool done = false;
  double at = 0;
  VectorClock clock;
};

struct Operation {
  enum Kind { kRun, kRecord, kWait } kind = kRun;
  std::string label;  // copy.h2d, copy.d2h, copy.d2d, memset, kernel:NAME, host, free, record, wait
  std::function<Failure(const Actor&)> run;
  std::shared_ptr<Completion> completion;
  VectorClock clock;
};

struct Graph;
struct Capture {
  std::shared_ptr<Graph> graph;
  std::vector<size_t> tail;  // nodes that the stream's next node depends on
  int mode = 0;
  bool origin = false;
};

struct Stream {
  int id = 0;           // 0: the legacy stream
  int participant = 0;  // reused when a stream is gone; shared when there are more streams than participants
  unsigned flags = 0;
  int priority = 0;
  std::deque<Operation> queue;
  bool running = false, closing = false;
  int64_t budget = -1;  // operations it may still start; -1: no limit, 0: held
  uint64_t operations_pushed = 0, operations_done = 0;
  VectorClock clock;
  std::unique_ptr<Capture> capture;
  std::condition_variable wake;
  bool drained() const { return queue.empty() && !running; }
};

struct Event {
  unsigned flags = 0;
  std::shared_ptr<Completion> last;     // of the latest record
  std::shared_ptr<Graph> captured_in;   // when recorded in a stream that captures
  std::vector<size_t> captured_tail;
};

Stream* stream_of(CUstream);            // the legacy stream for the special handles
std::map<int, Stream*>& streams();      // by id
size_t& live_events();
size_t& live_graphs();
VectorClock& host_clock();
using Run = std::function<Failure(const Actor&)>;
void enqueue(Stream*, const std::string& label, Run);  // locked; a node of the graph while the stream captures
void replay(Stream*, const std::string& label, Run);   // locked; never captured
std::shared_ptr<Completion> push_record(Stream*);       // locked
void push_wait(Stream*, const std::shared_ptr<Completion>&);  // locked
Stream* open_stream(unsigned flags, int priority);      // locked
void close_stream(Stream*);                             // locked; what is queued still runs
bool wait_until(Lock&, const std::function<bool()>&);  // false after `patience` seconds in which nothing ran
void synchronize(Lock&, Stream*);
void synchronize_all(Lock&);
void wake_all_streams();                // locked
void abandon_captures();                // locked
Stream& legacy_stream();
void start_streams();                   // locked; idempotent
std::string operation_name(int participant, uint32_t time);  // label of an earlier operation, for messages

// ---- errors of the context ----------------------------------------------------------------------------------------
struct ContextState {
  bool initialised = false;
  CUresult sticky = CUDA_SUCCESS;   // after a failed operation every call returns it
  CUresult explained = CUDA_SUCCESS;  // the code that last_error explains
  std::string last_error;
};
ContextState& context();
CUcontext primary_context();
void poison_context(const Failure&);                            // locked
CUresult explain(CUresult code, const std::string& message);  // locked; returns the code

// ---- graphs -----------------------------------------------------------------------------------------------------
struct GraphNode {
  std::string label;
  std::function<Failure(const Actor&)> run;
  std::vector<size_t> needs;
};
struct UserObject {
  CUhostFn destroy;
  void* data;
  unsigned references;
};
struct Graph {
  std::vector<GraphNode> nodes;
  std::map<UserObject*, unsigned> objects;
  bool invalidated = false;
  ~Graph();
};

}  // namespace emu
