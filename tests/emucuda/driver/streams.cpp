// The streams' threads and queues.
//
// Rules:
//  * A stream's thread starts an operation when it is at the head of the queue, the stream is not held, and, for a wait,
//    the awaited record is done. Nothing else ever runs an operation, so an event is not done while its stream is held.
//  * With checking on, operations run one at a time (`execution()`): the shadow memory needs no locks of its own, and what is
//    concurrent is decided by the clocks, not by timing.
//  * The legacy stream and the blocking streams wait for each other, through ordinary record and wait operations.
//  * After a failure operations are dropped but records still complete, so that nobody waits for ever; what waits
//    returns the context's error.
#include <algorithm>
#include <chrono>
#include <ctime>
#include <thread>

#include "api.h"
#include "shadow.h"

namespace emu {

void VectorClock::join(const VectorClock& other) {
  for (int i = 0; i < kParticipants; ++i)
    if (time[size_t(i)] < other.time[size_t(i)]) time[size_t(i)] = other.time[size_t(i)];
}
VectorClock& host_clock() {
  static auto& clock = *new VectorClock;
  return clock;
}
std::map<int, Stream*>& streams() {
  static auto& all = *new std::map<int, Stream*>;
  return all;
}
Stream& legacy_stream() {
  static auto& stream = *new Stream;
  return stream;
}
size_t& live_events() {
  static size_t n = 0;
  return n;
}
static std::mutex& execution() {
  static auto& m = *new std::mutex;
  return m;
}

Stream* stream_of(CUstream handle) {
  if (!handle || handle == kLegacyStream || handle == kPerThreadStream) return &legacy_stream();
  return reinterpret_cast<Stream*>(handle);
}

// Labels of earlier operations, so that a race can name both sides.
constexpr uint32_t kRemembered = 4096;
static std::string& label_slot(int participant, uint32_t time) {
  static auto& labels = *new std::map<uint64_t, std::string>;
  return labels[uint64_t(participant) << 32 | time % kRemembered];
}
static void remember_label(int participant, uint32_t time, const std::string& label) {
  Lock leaf(leaf_mutex());
  label_slot(participant, time) = label;
}
std::string operation_name(int participant, uint32_t time) {
  Lock leaf(leaf_mutex());
  std::string label = label_slot(participant, time);
  return label.empty() ? "an operation" : label;
}

// ---- running --------------------------------------------------------------------------------------------------------
void wake_all_streams() {
  for (auto& each : streams()) each.second->wake.notify_one();
}

static bool may_start(const Stream& s) {
  if (s.queue.empty() || s.budget == 0) return false;
  const Operation& op = s.queue.front();
  return op.kind != Operation::kWait || op.completion->done;
}

static double delay_of(const std::string& label) {
  double seconds = 0;
  for (auto& each : control().delays)
    if (each.first.empty() || label_matches(label, each.first)) seconds += each.second;
  return seconds;
}

static void pause(double seconds) {
  timespec t{time_t(seconds), long((seconds - double(time_t(seconds))) * 1e9)};
  nanosleep(&t, nullptr);
}

static void run_operation(Lock& lock, const Stream& stream, Operation& op) {
  if (context().sticky && op.label != "free") return;
  if (CUresult fault = take_fault(control().run_faults, op.label)) {
    poison_context({fault, op.label + " made to fail by a test"});
    return;
  }
  Actor actor{stream.participant, op.clock, op.label};
  remember_label(actor.participant, op.clock.time[size_t(stream.participant)], op.label);
  double delay = delay_of(op.label);
  bool checked = control().checked;
  lock.unlock();
  if (delay > 0) pause(delay);
  Failure failure;
  {
    std::unique_lock<std::mutex> alone(execution(), std::defer_lock);
    if (checked && op.label != "host") alone.lock();
    failure = op.run(actor);
    op.run = nullptr;  // what it captured may call back into the driver when destroyed
  }
  lock.lock();
  if (failure.code) poison_context(failure);
}

static uint64_t& operations_done() {
  static uint64_t n = 0;
  return n;
}

static void stream_thread(Stream* s) {
  Lock lock(mutex());
  for (;;) {
    s->wake.wait(lock, [&] { return may_start(*s) || (s->closing && s->queue.empty()); });
    if (s->queue.empty()) break;
    Operation op = std::move(s->queue.front());
    s->queue.pop_front();
    if (s->budget > 0) --s->budget;
    s->running = true;
    if (op.kind == Operation::kRun) run_operation(lock, *s, op);
    if (op.kind == Operation::kRecord) {
      op.completion->done = true;
      op.completion->at = now();
      wake_all_streams();
    }
    s->running = false;
    ++s->operations_done;
    ++operations_done();
    progress().notify_all();
  }
  streams().erase(s->id);
  progress().notify_all();
  delete s;
}

// ---- opening and closing --------------------------------------------------------------------------------------------
static VectorClock& final_times() {  // where each participant's time stood when its last stream closed
  static auto& times = *new VectorClock;
  return times;
}

static int free_participant(int id) {
  bool taken[kHost] = {};
  for (auto& each : streams()) taken[each.second->participant] = true;
  for (int p = 1; p < kHost; ++p)
    if (!taken[p]) return p;
  return 1 + id % (kHost - 1);
}

Stream* open_stream(unsigned flags, int priority) {
  static int last_id = 0;
  auto* s = new Stream;
  s->id = ++last_id;
  s->participant = free_participant(s->id);
  s->flags = flags;
  s->priority = priority;
  s->clock = host_clock();
  s->clock.time[size_t(s->participant)] = final_times().time[size_t(s->participant)];
  streams()[s->id] = s;
  std::thread(stream_thread, s).detach();
  return s;
}

void close_stream(Stream* s) {
  auto& time = final_times().time[size_t(s->participant)];
  time = std::max(time, s->clock.time[size_t(s->participant)]);
  s->closing = true;
  s->wake.notify_one();
}

void start_streams() {
  Stream& legacy = legacy_stream();
  if (!streams().emplace(0, &legacy).second) return;
  std::thread(stream_thread, &legacy).detach();
}

// ---- queueing ---------------------------------------------------------------------------------------------------------
static void push(Stream* s, Operation op) {
  ++s->operations_pushed;
  s->queue.push_back(std::move(op));
  s->wake.notify_one();
}

static void advance(Stream* s) {
  s->clock.join(host_clock());
  ++s->clock.time[size_t(s->participant)];
}

static void push_unordered_wait(Stream* s, const std::shared_ptr<Completion>& completion) {
  s->clock.join(completion->clock);
  Operation op;
  op.kind = Operation::kWait;
  op.label = "wait";
  op.completion = completion;
  push(s, std::move(op));
}

static std::shared_ptr<Completion> push_unordered_record(Stream* s) {
  advance(s);
  Operation op;
  op.kind = Operation::kRecord;
  op.label = "record";
  op.completion = std::make_shared<Completion>();
  op.completion->clock = s->clock;
  auto completion = op.completion;
  push(s, std::move(op));
  return completion;
}

// What the legacy stream implies: it waits for every blocking stream, and they wait for it.
static void order_with_legacy(Stream* s) {
  auto follow = [s](Stream* other) {
    s->clock.join(other->clock);
    if (!other->drained()) push_unordered_wait(s, push_unordered_record(other));
  };
  if (s == &legacy_stream()) {
    for (auto& each : streams())
      if (each.second != s && !(each.second->flags & CU_STREAM_NON_BLOCKING)) follow(each.second);
  } else if (!(s->flags & CU_STREAM_NON_BLOCKING)) {
    follow(&legacy_stream());
  }
}

std::shared_ptr<Completion> push_record(Stream* s) {
  order_with_legacy(s);
  return push_unordered_record(s);
}
void push_wait(Stream* s, const std::shared_ptr<Completion>& completion) {
  order_with_legacy(s);
  push_unordered_wait(s, completion);
}

void replay(Stream* s, const std::string& label, Run run) {
  order_with_legacy(s);
  advance(s);
  Operation op;
  op.label = label;
  op.run = std::move(run);
  op.clock = s->clock;
  push(s, std::move(op));
}

void enqueue(Stream* s, const std::string& label, Run run) {
  if (!s->capture) return replay(s, label, std::move(run));
  auto& nodes = s->capture->graph->nodes;
  nodes.push_back({label, std::move(run), s->capture->tail});
  s->capture->tail = {nodes.size() - 1};
}

// ---- waiting ----------------------------------------------------------------------------------------------------------
// A wait on a stream that a test holds for ever would hang the process: it ends with an error instead.
bool wait_until(Lock& lock, const std::function<bool()>& done) {
  while (!done()) {
    uint64_t before = operations_done();
    auto patience = std::chrono::duration<double>(control().patience);
    if (progress().wait_for(lock, patience) == std::cv_status::timeout && before == operations_done() && !done()) {
      poison_context({CUDA_ERROR_LAUNCH_TIMEOUT, "a wait in which nothing happened for " +
                                                     std::to_string(int(control().patience)) + " s: is a stream held?"});
      return false;
    }
  }
  return true;
}

void synchronize(Lock& lock, Stream* s) {
  uint64_t target = s->operations_pushed;
  VectorClock clock = s->clock;
  int id = s->id;
  wait_until(lock, [&] {  // a stream that is gone has run everything
    auto it = streams().find(id);
    return it == streams().end() || it->second->operations_done >= target;
  });
  host_clock().join(clock);
}

void synchronize_all(Lock& lock) {
  std::vector<int> ids;
  for (auto& each : streams()) ids.push_back(each.first);
  for (int id : ids) {
    auto it = streams().find(id);
    if (it != streams().end()) synchronize(lock, it->second);
  }
}

}  // namespace emu
