// The blocks of a launch, spread over worker threads, and the handler for wild accesses.
//
// Rules:
//  * With checking on, one thread runs all blocks in order. Otherwise idle workers help: blocks may run in any order and at the
//    same time, as on the device, and atomics are real ones.
//  * A block that touches an unmapped page ends the launch with an illegal address, as on the device; the process lives.
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "api.h"
#include "block.h"
#include "shadow.h"

namespace emu {

// ---- wild accesses --------------------------------------------------------------------------------------------------------
static struct sigaction previous_segv, previous_bus;

static void on_fault(int signal, siginfo_t* info, void* context) {
  if (BlockRunner* runner = active_runner) {
    char text[160];
    snprintf(text, sizeof text, "access of unmapped address %p; run with checking on for the source line", info->si_addr);
    runner->fail(*runner->current(), CUDA_ERROR_ILLEGAL_ADDRESS, text, -1);
  }
  const auto& previous = signal == SIGSEGV ? previous_segv : previous_bus;
  if (previous.sa_flags & SA_SIGINFO) return previous.sa_sigaction(signal, info, context);
  sigaction(signal, &previous, nullptr);  // the instruction faults again, with whatever was installed before us
}

void install_fault_handler() {
  struct sigaction action {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigaction(SIGSEGV, &action, &previous_segv);
  sigaction(SIGBUS, &action, &previous_bus);
}

// The handler needs a stack of its own: the fault may be a fiber's stack overflow.
static void give_thread_a_signal_stack() {
  static thread_local bool done = false;
  if (done) return;
  done = true;
  constexpr size_t kBytes = 64 << 10;
  stack_t stack{};
  stack.ss_sp = malloc(kBytes);
  stack.ss_size = kBytes;
  sigaltstack(&stack, nullptr);
}

// ---- runners: costly to make (stacks), so they are kept ------------------------------------------------------------------
struct RunnerStore {
  std::mutex lock;
  std::vector<BlockRunner*> idle;
};
static RunnerStore& store() {
  static auto& s = *new RunnerStore;
  return s;
}
static BlockRunner* take_runner() {
  Lock lock(store().lock);
  if (store().idle.empty()) return new BlockRunner;
  auto* runner = store().idle.back();
  store().idle.pop_back();
  return runner;
}
static void give_back(BlockRunner* runner) {
  Lock lock(store().lock);
  store().idle.push_back(runner);
}

// ---- blocks over workers ----------------------------------------------------------------------------------------------------
struct Job {
  const GridLaunch& launch;
  const Actor& actor;
  bool checked;
  unsigned order;
  uint64_t n_blocks;
  std::atomic<uint64_t> next{0};
  std::atomic<int> helpers{0};
  std::mutex lock;
  Failure failure;
};

static void work_on(Job& job) {
  give_thread_a_signal_stack();
  BlockRunner* runner = take_runner();
  runner->start_grid(job.launch, job.actor, job.checked, job.order);
  Dim grid = job.launch.grid;
  for (uint64_t i; (i = job.next.fetch_add(1)) < job.n_blocks;) {
    Dim block{uint32_t(i % grid.x), uint32_t(i / grid.x % grid.y), uint32_t(i / grid.x / grid.y)};
    if (runner->run_block(block)) continue;
    job.next = job.n_blocks;
    Lock lock(job.lock);
    if (!job.failure.code) job.failure = runner->failure();
  }
  give_back(runner);
}

class Workers {
 public:
  void run(Job& job, int n) {
    {
      Lock lock(lock_);
      while (n_threads_ < n) ++n_threads_, std::thread(&Workers::loop, this).detach();
      jobs_.push_back(&job);
    }
    wake_.notify_all();
    work_on(job);
    Lock lock(lock_);
    for (size_t i = 0; i < jobs_.size(); ++i)
      if (jobs_[i] == &job) jobs_.erase(jobs_.begin() + long(i));
    idle_.wait(lock, [&] { return job.helpers == 0; });
  }

 private:
  Job* job_with_blocks() {
    for (auto* job : jobs_)
      if (job->next < job->n_blocks) return job;
    return nullptr;
  }
  void loop() {
    Lock lock(lock_);
    for (;;) {
      Job* job = nullptr;
      wake_.wait(lock, [&] { return (job = job_with_blocks()); });
      ++job->helpers;
      lock.unlock();
      work_on(*job);
      lock.lock();
      --job->helpers;
      idle_.notify_all();
    }
  }
  std::mutex lock_;
  std::condition_variable wake_, idle_;
  std::vector<Job*> jobs_;
  int n_threads_ = 0;
};

Failure run_grid(const GridLaunch& launch, const Actor& actor) {
  static auto& workers = *new Workers;
  uint64_t n_blocks = uint64_t(launch.grid.x) * launch.grid.y * launch.grid.z;
  Job job{launch, actor, control().checked, control().thread_order, n_blocks, {0}, {0}, {}, {}};
  constexpr uint64_t kWorthSharing = 2;
  if (job.checked || control().workers < 2 || n_blocks < kWorthSharing)
    work_on(job);
  else
    workers.run(job, control().workers - 1);
  return job.failure;
}

// ---- printf in kernels ------------------------------------------------------------------------------------------------------
// Arguments lie as the C ABI of vprintf on the device has them: each aligned to its size, floats as doubles.
void print_formatted(Thread*, const char* format, const char* arguments) {
  std::string out;
  size_t at = 0;
  auto take = [&](void* to, size_t bytes) {
    at = (at + bytes - 1) / bytes * bytes;
    memcpy(to, arguments + at, bytes);
    at += bytes;
  };
  for (const char* p = format; *p;) {
    if (*p != '%' || p[1] == '%') {
      out += *p;
      p += *p == '%' ? 2 : 1;
      continue;
    }
    const char* end = p + 1;
    while (*end && !strchr("diouxXcsfFeEgGap", *end)) ++end;
    std::string spec(p, end + 1);
    char text[512];
    if (strchr("fFeEgGa", *end)) {
      double v;
      take(&v, 8);
      snprintf(text, sizeof text, spec.c_str(), v);
    } else if (strchr("sp", *end) || spec.find('l') != std::string::npos) {
      long long v;
      take(&v, 8);
      snprintf(text, sizeof text, spec.c_str(), v);
    } else {
      int v;
      take(&v, 4);
      snprintf(text, sizeof text, spec.c_str(), v);
    }
    out += text;
    p = end + 1;
  }
  fputs(out.c_str(), stdout);
  fflush(stdout);
}

}  // namespace emu
