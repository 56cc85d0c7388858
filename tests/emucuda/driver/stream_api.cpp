// Entry points for streams, events and host functions.
#include "api.h"

namespace emu {

static CUstream handle_of(Stream* s) { return reinterpret_cast<CUstream>(s); }
static Event* event_of(CUevent e) { return reinterpret_cast<Event*>(e); }

// ---- streams ----------------------------------------------------------------------------------------------------------
EMU_API(cuStreamCreateWithPriority, 5050, CUstream* stream, unsigned flags, int priority) {
  Lock lock(mutex());
  *stream = handle_of(open_stream(flags, priority));
  return CUDA_SUCCESS;
}
EMU_API(cuStreamCreate, 2000, CUstream* stream, unsigned flags) {
  Lock lock(mutex());
  *stream = handle_of(open_stream(flags, 0));
  return CUDA_SUCCESS;
}
EMU_API(cuStreamDestroy, 4000, CUstream stream) {
  Lock lock(mutex());
  if (stream_of(stream) == &legacy_stream()) return CUDA_ERROR_INVALID_HANDLE;
  close_stream(stream_of(stream));
  return CUDA_SUCCESS;
}
EMU_API(cuStreamGetFlags, 5050, CUstream stream, unsigned* flags) {
  *flags = stream_of(stream)->flags;
  return CUDA_SUCCESS;
}
EMU_API(cuStreamGetPriority, 5050, CUstream stream, int* priority) {
  *priority = stream_of(stream)->priority;
  return CUDA_SUCCESS;
}
EMU_API(cuStreamGetId, 12000, CUstream stream, unsigned long long* id) {
  *id = (unsigned long long)stream_of(stream)->id;
  return CUDA_SUCCESS;
}
EMU_API(cuStreamGetDevice, 12080, CUstream, CUdevice* device) {
  *device = 0;
  return CUDA_SUCCESS;
}

static CUresult stream_context(CUcontext* context) {
  *context = primary_context();
  return CUDA_SUCCESS;
}
EMU_API(cuStreamGetCtx, 9020, CUstream, CUcontext* context) { return stream_context(context); }
EMU_API_AS(stream_get_ctx_v2, cuStreamGetCtx, 12050, CUstream, CUcontext* context, void** green) {
  if (green) *green = nullptr;
  return stream_context(context);
}

static CUresult refuse_while_capturing(Stream* s, const char* call) {
  s->capture->graph->invalidated = true;
  return explain(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, std::string(call) + " on a stream that captures");
}

EMU_API(cuStreamQuery, 2000, CUstream stream) {
  Lock lock(mutex());
  Stream* s = stream_of(stream);
  if (s->capture) return refuse_while_capturing(s, "cuStreamQuery");
  if (!s->drained()) return CUDA_ERROR_NOT_READY;
  host_clock().join(s->clock);
  return context().sticky;
}
EMU_API(cuStreamSynchronize, 2000, CUstream stream) {
  Lock lock(mutex());
  Stream* s = stream_of(stream);
  if (s->capture) return refuse_while_capturing(s, "cuStreamSynchronize");
  if (CUresult fault = this_call().describe("sync.stream", s)) return fault;
  synchronize(lock, s);
  return context().sticky;
}

// ---- events -----------------------------------------------------------------------------------------------------------
EMU_API(cuEventCreate, 2000, CUevent* event, unsigned flags) {
  Lock lock(mutex());
  auto* e = new Event;
  e->flags = flags;
  ++live_events();
  *event = reinterpret_cast<CUevent>(e);
  return CUDA_SUCCESS;
}
EMU_API(cuEventDestroy, 4000, CUevent event) {
  Lock lock(mutex());
  --live_events();
  delete event_of(event);
  return CUDA_SUCCESS;
}

static CUresult record_event(Event* e, Stream* s) {
  if (CUresult fault = this_call().describe("event.record", s)) return fault;
  if (s->capture) {
    e->last = nullptr;
    e->captured_in = s->capture->graph;
    e->captured_tail = s->capture->tail;
    return CUDA_SUCCESS;
  }
  e->captured_in = nullptr;
  e->last = push_record(s);
  return CUDA_SUCCESS;
}
EMU_API(cuEventRecord, 2000, CUevent event, CUstream stream) {
  Lock lock(mutex());
  return record_event(event_of(event), stream_of(stream));
}
EMU_API(cuEventRecordWithFlags, 11010, CUevent event, CUstream stream, unsigned) {
  Lock lock(mutex());
  return record_event(event_of(event), stream_of(stream));
}
EMU_API(cuEventQuery, 2000, CUevent event) {
  Lock lock(mutex());
  Event* e = event_of(event);
  if (e->captured_in) return CUDA_ERROR_CAPTURED_EVENT;
  if (e->last && !e->last->done) return CUDA_ERROR_NOT_READY;
  if (e->last) host_clock().join(e->last->clock);
  return context().sticky;
}
EMU_API(cuEventSynchronize, 2000, CUevent event) {
  Lock lock(mutex());
  Event* e = event_of(event);
  if (e->captured_in) return CUDA_ERROR_CAPTURED_EVENT;
  if (CUresult fault = this_call().describe("sync.event", nullptr)) return fault;
  auto completion = e->last;  // a later record of the same event is not waited for
  if (!completion) return CUDA_SUCCESS;
  wait_until(lock, [&] { return completion->done; });
  host_clock().join(completion->clock);
  return context().sticky;
}
EMU_API(cuEventElapsedTime, 2000, float* milliseconds, CUevent start, CUevent end) {
  Lock lock(mutex());
  auto a = event_of(start)->last, b = event_of(end)->last;
  if (!a || !b || ((event_of(start)->flags | event_of(end)->flags) & CU_EVENT_DISABLE_TIMING))
    return CUDA_ERROR_INVALID_HANDLE;
  if (!a->done || !b->done) return CUDA_ERROR_NOT_READY;
  *milliseconds = float((b->at - a->at) * 1e3);
  return CUDA_SUCCESS;
}

// A stream that waits for a captured event joins that capture.
static void join_capture(Stream* s, const Event& e) {
  if (!s->capture) {
    s->capture = std::make_unique<Capture>();
    s->capture->graph = e.captured_in;
  }
  auto& tail = s->capture->tail;
  tail.insert(tail.end(), e.captured_tail.begin(), e.captured_tail.end());
}
EMU_API(cuStreamWaitEvent, 3020, CUstream stream, CUevent event, unsigned) {
  Lock lock(mutex());
  Stream* s = stream_of(stream);
  Event* e = event_of(event);
  if (CUresult fault = this_call().describe("event.wait", s)) return fault;
  if (e->captured_in)
    join_capture(s, *e);
  else if (e->last && s->capture)
    return explain(CUDA_ERROR_NOT_SUPPORTED, "a capturing stream waits for an event recorded outside the capture");
  else if (e->last)
    push_wait(s, e->last);
  return CUDA_SUCCESS;
}

// ---- host functions ---------------------------------------------------------------------------------------------------
static CUresult launch_host_function(CUstream stream, CUhostFn function, void* data) {
  Lock lock(mutex());
  Stream* s = stream_of(stream);
  if (CUresult fault = this_call().describe("host", s)) return fault;
  enqueue(s, "host", [=](const Actor& actor) {
    {
      Lock lock(mutex());
      host_clock().join(actor.clock);
    }
    function(data);
    return Failure{};
  });
  return CUDA_SUCCESS;
}
EMU_API(cuLaunchHostFunc, 10000, CUstream stream, CUhostFn function, void* data) {
  return launch_host_function(stream, function, data);
}
EMU_API_AS(launch_host_func_v2, cuLaunchHostFunc, 13020, CUstream stream, CUhostFn function, void* data, unsigned) {
  return launch_host_function(stream, function, data);
}

}  // namespace emu
