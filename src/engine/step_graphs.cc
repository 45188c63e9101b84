#include "engine/step_graphs.h"

#include <algorithm>
#include <functional>

namespace moebius {
namespace {

constexpr int64_t kEagerLaunches = 2;

class GpuGraphs final : public GraphDevice {
 public:
  explicit GpuGraphs(Accelerator& gpu) : gpu_(gpu) {}
  std::function<void()> capture(GraphCapture& capture, const std::function<void()>& body) override {
    return [this, graph = CudaGraph(gpu_, capture, body)] { graph.replay(gpu_); };
  }

 private:
  Accelerator& gpu_;
};

}  // namespace

std::unique_ptr<GraphDevice> graph_device(Accelerator& gpu) { return std::make_unique<GpuGraphs>(gpu); }

void StepGraphs::run(const StepPart& part, Stream& s, const std::function<void(Stream&)>& body) {
  StepPart of_both = part;
  of_both.pending = false;
  const int64_t launches = ++launches_[of_both];
  if (!captures() || s.trace() || launches <= kEagerLaunches) return body(s);
  Graph* graph = graph_of(part);
  if (graph == nullptr) return body(s);
  if (!graph->launch) capture(*graph, s, body);
  graph->launch();
  graph->capture->replayed();
}

StepGraphs::Graph* StepGraphs::graph_of(const StepPart& part) {
  const bool is_mixed = std::ranges::adjacent_find(part.cps, std::not_equal_to()) != part.cps.end();
  if (is_mixed && !sequences_.contains(part.cps)) {
    if (std::ssize(sequences_) == kMaxSequences) return nullptr;
    sequences_.insert(part.cps);
  }
  return &graphs_[part];
}

void StepGraphs::capture(Graph& graph, const Stream& s, const std::function<void(Stream&)>& body) {
  auto capture = std::make_unique<GraphCapture>();
  Stream captured = s;
  captured.set_capture(capture.get());
  graph.launch = device_->capture(*capture, [&] { body(captured); });
  graph.capture = std::move(capture);
}

}  // namespace moebius
