#include "parallel/pipeline.h"

#include <algorithm>

#include "parallel/replay.h"

namespace moebius {
namespace {

PlacedList proven(const Schedule& schedule, int64_t pp_rank) {
  replay(schedule, equal_times(schedule.shape));
  return place_actions(schedule, pp_rank);
}

}  // namespace

PipelineRank pipeline_rank(const PipelineSpec& spec, const ModelSpec& model, int64_t num_ranks, int64_t pp_rank) {
  PipelineRank rank{.pp_rank = pp_rank};
  rank.layout = stage_layout({.text = spec.layout,
                              .num_ranks = num_ranks,
                              .num_virtual = spec.num_virtual,
                              .num_layers = model.num_layers,
                              .num_mtp = model.num_mtp_layers});
  check_mtp_stage(rank.layout);
  PipelineShape shape{.num_ranks = num_ranks, .num_virtual = spec.num_virtual, .num_micro_batches = 1};
  rank.alone = proven(schedule_in_turn(shape), pp_rank);
  shape.backward = false;
  rank.forward = proven(schedule_in_turn(shape), pp_rank);
  shape.backward = true;
  shape.num_micro_batches = spec.num_micro_batches;
  const Schedule step = schedule_1f1b(shape);
  rank.step = proven(spec.overlap ? step : without_overlap(step), pp_rank);
  return rank;
}

std::vector<HeldStage> PipelineRank::stages() const {
  std::vector<HeldStage> held;
  for (int64_t v = 0; v < layout.num_virtual(); ++v)
    held.push_back({.spec = layout.at(pp_rank, v), .num_saved = step.num_saved_sets[static_cast<size_t>(v)]});
  return held;
}

Pipeline::Pipeline(const PipelineRank& rank, Model& model, const Mesh& mesh, MemoryPlan& plan)
    : rank_(rank), model_(model), mesh_(mesh) {
  buffers_TD_.resize(std::max({rank.step.num_buffers, rank.alone.num_buffers, rank.forward.num_buffers}));
  for (size_t i = 0; i < buffers_TD_.size(); ++i) {
    plan.declare(buffers_TD_[i], fmt::format("pipeline.buffer{}", i), {model.stream_rows(), model.spec().hidden_size},
                 model.dtype(), Life::saved);
  }
}

void Pipeline::run_step(Stream& s, StepStack& stack, const BatchOf& batch) const { run(s, stack, rank_.step, batch); }

void Pipeline::run_alone(Stream& s, StepStack& stack, const MicroBatch& batch) const {
  run(s, stack, rank_.alone, [&](int64_t) -> const MicroBatch& { return batch; });
}

void Pipeline::run_forward(Stream& s, StepStack& stack, const MicroBatch& batch) const {
  run(s, stack, rank_.forward, [&](int64_t) -> const MicroBatch& { return batch; });
}

void Pipeline::run_once(Stream& s, StepStack& stack, const MicroBatch& batch) const {
  Step step{s, stack, batch};
  const int64_t V = rank_.layout.num_virtual();
  for (int64_t v = 0; v < V; ++v) model_.forward(step, {.virtual_stage = v}, buffers_TD_[0], /*with_gradients=*/true);
  for (int64_t v = V; v-- > 0;) model_.backward(step, {.virtual_stage = v}, buffers_TD_[0]);
}

void Pipeline::run_cached(Stream& s, StepStack& stack, const MicroBatch& batch, std::span<const KvCache> caches,
                          int64_t first, int64_t num_tokens) const {
  Step step{s, stack, batch};
  const int64_t P = rank_.layout.num_ranks;
  run(s, rank_.forward, num_tokens / mesh_.shape().tp, [&](const PlacedAction& placed, const Tensor& stream_tD) {
    model_.forward_cached(step, {.virtual_stage = placed.action.stage / P}, stream_tD, caches, first);
  });
}

void Pipeline::run(Stream& s, StepStack& stack, const PlacedList& list, const BatchOf& batch) const {
  run(s, list, model_.stream_rows(), [&](const PlacedAction& placed, const Tensor& stream_tD) {
    Step step{s, stack, batch(placed.action.micro_batch)};
    compute(step, list.shape, placed, stream_tD);
  });
}

// rows: of a message.
void Pipeline::run(Stream& s, const PlacedList& list, int64_t rows, const Compute& compute) const {
  std::vector<Pending> pending(buffers_TD_.size());  // a buffer has one message on its way at a time
  for (const PlacedAction& placed : list.actions) {
    const auto& [verb, pass, m, stage] = placed.action;
    const Tensor buffer_TD = buffers_TD_[placed.buffer].rows(0, rows);
    const auto pp_rank_of = [&](int64_t of_stage) { return static_cast<int>(list.shape.rank_of(of_stage)); };
    try {
      switch (verb) {
        case Verb::receive:
          pending[placed.buffer] = group(pass).recv(s, buffer_TD, pp_rank_of(stage - onward(pass)));
          break;
        case Verb::run:
          pending[placed.buffer].wait();
          compute(placed, buffer_TD);
          break;
        case Verb::send:
          pending[placed.buffer] = group(pass).send(s, buffer_TD, pp_rank_of(stage + onward(pass)));
          break;
        case Verb::wait:
          pending[placed.buffer].wait();
          break;
      }
    } catch (const Error& e) {
      throw Error(e.kind(), fmt::format("pipeline, {}: {}", describe(placed.action), e.what()));
    }
  }
}

void Pipeline::compute(Step& step, const PipelineShape& shape, const PlacedAction& placed,
                       const Tensor& stream_tD) const {
  const Action& a = placed.action;
  const StagePass at{.virtual_stage = a.stage / shape.num_ranks, .saved_set = placed.saved_set};
  PhaseScope phase(step.stream, a.pass == Pass::forward ? "pipeline forward" : "pipeline backward", a.micro_batch);
  if (a.pass == Pass::forward)
    model_.forward(step, at, stream_tD, /*with_gradients=*/shape.backward);
  else
    model_.backward(step, at, stream_tD);
}

}  // namespace moebius
