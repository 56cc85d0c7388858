// Stream capture and graphs.
//
// Rules:
//  * While a stream captures, what is enqueued becomes a node; another stream joins the capture by waiting for an event
//    recorded in it, and must be joined back before the capture ends.
//  * A launch replays the nodes, in the order of capture, on the stream of the launch: one legal order of the graph.
//  * An instantiated graph is a copy. It keeps its user objects alive, as the captured graph does.
#include <algorithm>

#include "api.h"

namespace emu {

size_t& live_graphs() {
  static size_t n = 0;
  return n;
}

// ---- user objects -----------------------------------------------------------------------------------------------------
static std::vector<UserObject*>& doomed() {
  static auto& objects = *new std::vector<UserObject*>;
  return objects;
}
static void drop_references(UserObject* object, unsigned n) {
  object->references -= n;
  if (object->references == 0) doomed().push_back(object);
}
Graph::~Graph() {
  for (auto& each : objects) drop_references(each.first, each.second);
}
// Destructors of user objects may call back (into Python, too): run them without the lock.
static void destroy_doomed() {
  std::vector<UserObject*> objects;
  {
    Lock lock(mutex());
    objects.swap(doomed());
  }
  for (auto* object : objects) {
    object->destroy(object->data);
    delete object;
  }
}

EMU_API(cuUserObjectCreate, 11030, CUuserObject* out, void* data, CUhostFn destroy, unsigned references, unsigned) {
  *out = reinterpret_cast<CUuserObject>(new UserObject{destroy, data, references});
  return CUDA_SUCCESS;
}
EMU_API(cuUserObjectRetain, 11030, CUuserObject object, unsigned n) {
  Lock lock(mutex());
  reinterpret_cast<UserObject*>(object)->references += n;
  return CUDA_SUCCESS;
}
EMU_API(cuUserObjectRelease, 11030, CUuserObject object, unsigned n) {
  {
    Lock lock(mutex());
    drop_references(reinterpret_cast<UserObject*>(object), n);
  }
  destroy_doomed();
  return CUDA_SUCCESS;
}

// ---- handles ----------------------------------------------------------------------------------------------------------
// A handle owns a share of the graph, since a capture in progress owns another.
using Share = std::shared_ptr<Graph>;
static Share& share_of(CUgraph g) { return *reinterpret_cast<Share*>(g); }
static Share& share_of(CUgraphExec g) { return *reinterpret_cast<Share*>(g); }
template <class Handle>
static Handle make_handle(Share graph) {
  ++live_graphs();
  return reinterpret_cast<Handle>(new Share(std::move(graph)));
}
template <class Handle>
static CUresult destroy_handle(Handle handle) {
  {
    Lock lock(mutex());
    --live_graphs();
    delete reinterpret_cast<Share*>(handle);
  }
  destroy_doomed();
  return CUDA_SUCCESS;
}
EMU_API(cuGraphDestroy, 10000, CUgraph graph) { return destroy_handle(graph); }
EMU_API(cuGraphExecDestroy, 10000, CUgraphExec exec) { return destroy_handle(exec); }

EMU_API(cuGraphRetainUserObject, 11030, CUgraph graph, CUuserObject object, unsigned n, unsigned flags) {
  Lock lock(mutex());
  auto* o = reinterpret_cast<UserObject*>(object);
  constexpr unsigned kMove = 1;
  if (!(flags & kMove)) o->references += n;
  share_of(graph)->objects[o] += n;
  return CUDA_SUCCESS;
}
EMU_API(cuGraphReleaseUserObject, 11030, CUgraph graph, CUuserObject object, unsigned n) {
  {
    Lock lock(mutex());
    auto* o = reinterpret_cast<UserObject*>(object);
    auto& held = share_of(graph)->objects;
    if (held[o] < n) return CUDA_ERROR_INVALID_VALUE;
    if ((held[o] -= n) == 0) held.erase(o);
    drop_references(o, n);
  }
  destroy_doomed();
  return CUDA_SUCCESS;
}

// ---- capture ----------------------------------------------------------------------------------------------------------
// The handle that a capture in progress shows (cuStreamGetCaptureInfo) is the one that its end returns.
static std::map<Graph*, CUgraph>& capture_handles() {
  static auto& handles = *new std::map<Graph*, CUgraph>;
  return handles;
}
EMU_API(cuStreamBeginCapture, 10010, CUstream stream, int mode) {
  Lock lock(mutex());
  Stream* s = stream_of(stream);
  if (s == &legacy_stream()) return explain(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "the legacy stream cannot capture");
  if (s->capture) return CUDA_ERROR_INVALID_VALUE;
  s->capture = std::make_unique<Capture>();
  s->capture->graph = std::make_shared<Graph>();
  s->capture->mode = mode;
  s->capture->origin = true;
  capture_handles()[s->capture->graph.get()] = make_handle<CUgraph>(s->capture->graph);
  return CUDA_SUCCESS;
}

static CUresult leave_capture(Stream* s, const Share& graph) {
  std::vector<size_t> open;  // the last nodes of streams that joined
  for (auto& each : streams()) {
    auto& capture = each.second->capture;
    if (!capture || capture->graph != graph || each.second == s) continue;
    open.insert(open.end(), capture->tail.begin(), capture->tail.end());
    capture.reset();
  }
  auto& nodes = graph->nodes;
  std::vector<bool> reached(nodes.size(), false);
  for (size_t last : s->capture->tail) reached[last] = true;
  for (size_t i = nodes.size(); i-- > 0;)
    if (reached[i])
      for (size_t need : nodes[i].needs) reached[need] = true;
  bool joined = std::all_of(open.begin(), open.end(), [&](size_t node) { return bool(reached[node]); });
  bool invalidated = graph->invalidated;
  s->capture.reset();
  if (invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  return joined ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
}
EMU_API(cuStreamEndCapture, 10000, CUstream stream, CUgraph* out) {
  CUresult result;
  {
    Lock lock(mutex());
    Stream* s = stream_of(stream);
    if (!s->capture) return CUDA_ERROR_INVALID_VALUE;
    if (!s->capture->origin) return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    Share graph = s->capture->graph;
    CUgraph handle = capture_handles()[graph.get()];
    capture_handles().erase(graph.get());
    result = leave_capture(s, graph);
    if (out) *out = result ? nullptr : handle;
    if (result || !out) {
      --live_graphs();
      delete reinterpret_cast<Share*>(handle);
    }
  }
  destroy_doomed();
  return result;
}

void abandon_captures() {
  for (auto& each : streams()) each.second->capture.reset();
  for (auto& each : capture_handles()) {
    --live_graphs();
    delete reinterpret_cast<Share*>(each.second);
  }
  capture_handles().clear();
}

static int capture_status(const Stream& s) {
  if (!s.capture) return CU_STREAM_CAPTURE_STATUS_NONE;
  return s.capture->graph->invalidated ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
}
EMU_API(cuStreamIsCapturing, 10000, CUstream stream, int* status) {
  Lock lock(mutex());
  *status = capture_status(*stream_of(stream));
  return CUDA_SUCCESS;
}
EMU_API(cuStreamGetCaptureInfo, 12030, CUstream stream, int* status, uint64_t* id, CUgraph* graph,
        const CUgraphNode** needs, const void** edges, size_t* n_needs) {
  Lock lock(mutex());
  Stream* s = stream_of(stream);
  *status = capture_status(*s);
  if (!s->capture) return CUDA_SUCCESS;
  if (id) *id = reinterpret_cast<uint64_t>(s->capture->graph.get());
  if (graph) *graph = capture_handles()[s->capture->graph.get()];
  if (needs) *needs = nullptr;
  if (edges) *edges = nullptr;
  if (n_needs) *n_needs = 0;
  return CUDA_SUCCESS;
}

// ---- instantiate, update, launch ------------------------------------------------------------------------------------------
static CUgraphExec instantiate(CUgraph graph) {
  Lock lock(mutex());
  auto copy = std::make_shared<Graph>(*share_of(graph));
  for (auto& each : copy->objects) each.first->references += each.second;
  return make_handle<CUgraphExec>(copy);
}
EMU_API(cuGraphInstantiateWithParams, 12000, CUgraphExec* exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS* params) {
  *exec = instantiate(graph);
  if (params) params->result_out = 0;  // CUDA_GRAPH_INSTANTIATE_SUCCESS
  return CUDA_SUCCESS;
}
EMU_API(cuGraphInstantiateWithFlags, 11040, CUgraphExec* exec, CUgraph graph, unsigned long long) {
  *exec = instantiate(graph);
  return CUDA_SUCCESS;
}
EMU_API(cuGraphUpload, 11010, CUgraphExec, CUstream) { return CUDA_SUCCESS; }

static bool same_topology(const Graph& a, const Graph& b) {
  return a.nodes.size() == b.nodes.size() &&
         std::equal(a.nodes.begin(), a.nodes.end(), b.nodes.begin(),
                    [](const GraphNode& x, const GraphNode& y) { return x.needs == y.needs && x.label == y.label; });
}
EMU_API(cuGraphExecUpdate, 10020, CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo* info) {
  Lock lock(mutex());
  bool same = same_topology(*share_of(exec), *share_of(graph));
  if (info) *info = {same ? CU_GRAPH_EXEC_UPDATE_SUCCESS : CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED, nullptr, nullptr};
  if (!same) return CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
  share_of(exec)->nodes = share_of(graph)->nodes;
  return CUDA_SUCCESS;
}
EMU_API(cuGraphLaunch, 10000, CUgraphExec exec, CUstream stream) {
  Lock lock(mutex());
  Stream* s = stream_of(stream);
  if (CUresult fault = this_call().describe("graph.launch", s)) return fault;
  if (s->capture) return explain(CUDA_ERROR_NOT_SUPPORTED, "launching a graph into a capture is not emulated");
  for (auto& node : share_of(exec)->nodes) {
    ++control().counts["graph:" + node.label];
    replay(s, node.label, node.run);
  }
  return CUDA_SUCCESS;
}
EMU_API(cuGraphGetNodes, 10000, CUgraph graph, CUgraphNode* nodes, size_t* n) {
  Lock lock(mutex());
  size_t have = share_of(graph)->nodes.size();
  for (size_t i = 0; nodes && i < std::min(*n, have); ++i) nodes[i] = reinterpret_cast<CUgraphNode>(i + 1);
  *n = have;
  return CUDA_SUCCESS;
}

}  // namespace emu
