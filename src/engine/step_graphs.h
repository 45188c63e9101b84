// The CUDA graphs of the parts of a training step, and of passes that generate one token of each sequence. The first
// two launches of a part are eager, and choose its algorithms; they count with and without a pending update. The third
// launch captures it, and later launches replay it. All ranks must capture a part in the same step, since a collective
// is captured by all ranks or by none. So a traced launch, which is eager, counts too.
#pragma once

#include <compare>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "device/accelerator.h"
#include "device/device.h"

namespace moebius {

// The key of a part. The first passes of a step store gradients, to which later ones add, and gather the weights that
// the last step changed; the last passes reduce gradients. With parallel.dynamic_cp, passes for each cp have a graph;
// in a pipeline, whose passes are those of all micro-batches of a step, each sequence of cp has one.
// The first passes, and the end of a step, are other work while the update of a step is pending.
struct StepPart {
  enum class Kind { weights, passes, update, pending_update, end_of_step, single_tokens, drawn_tokens };
  Kind kind = Kind::passes;
  bool first = false, last = false;  // whether these passes are the first, or the last, of the step
  bool pending = false;              // whether an update is pending
  std::vector<int64_t> cps = {};     // MicroBatch::cp of each micro-batch of the passes
  int64_t rows = 0;                  // rows of single_tokens and drawn_tokens
  auto operator<=>(const StepPart&) const = default;

  static StepPart weights() { return {.kind = Kind::weights}; }
  static StepPart passes(bool first, bool last, std::vector<int64_t> cps = {}, bool pending = false) {
    return {.kind = Kind::passes, .first = first, .last = last, .pending = pending, .cps = std::move(cps)};
  }
  static StepPart update() { return {.kind = Kind::update}; }
  static StepPart pending_update() { return {.kind = Kind::pending_update}; }
  static StepPart end_of_step(bool pending = false) { return {.kind = Kind::end_of_step, .pending = pending}; }
  static StepPart single_tokens(int64_t rows) { return {.kind = Kind::single_tokens, .rows = rows}; }
  static StepPart drawn_tokens(int64_t rows) { return {.kind = Kind::drawn_tokens, .rows = rows}; }
};

// The interface that captures the work of a GPU. Tests implement it without a GPU.
class GraphDevice {
 public:
  virtual ~GraphDevice() = default;
  // Runs body once; its device work is captured instead of executed. Returns a function that launches this work.
  virtual std::function<void()> capture(GraphCapture& capture, const std::function<void()>& body) = 0;
};

std::unique_ptr<GraphDevice> graph_device(Accelerator& gpu);

class StepGraphs {
 public:
  // A step of M micro-batches has at most C(M + n - 1, n - 1) sequences of n values of cp, since they are sorted. The
  // sequences that are captured first keep their graphs, up to this number, and the passes of others stay eager: a
  // graph of a pipeline has the kernels of a whole step.
  static constexpr int64_t kMaxSequences = 8;

  StepGraphs() = default;  // every part is eager
  explicit StepGraphs(std::unique_ptr<GraphDevice> device) : device_(std::move(device)) {}

  bool captures() const { return device_ != nullptr; }
  // Runs a part, by body(s) or by a replay of the work that was captured from body. After a replay it runs the host
  // code that was registered during the capture (GraphCapture::after_replay). With a trace it is always eager.
  void run(const StepPart& part, Stream& s, const std::function<void(Stream&)>& body);

 private:
  struct Graph {
    std::unique_ptr<GraphCapture> capture;
    std::function<void()> launch;  // empty until the part is captured
  };
  // Returns the graph of a part, a new one if needed; null if the part stays eager.
  Graph* graph_of(const StepPart& part);
  void capture(Graph& graph, const Stream& s, const std::function<void(Stream&)>& body);

  std::unique_ptr<GraphDevice> device_;
  std::map<StepPart, int64_t> launches_;  // of both values of StepPart::pending
  std::map<StepPart, Graph> graphs_;
  std::set<std::vector<int64_t>> sequences_;  // of several cp that differ, in graphs_
};

}  // namespace moebius
