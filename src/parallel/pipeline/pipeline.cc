#include "parallel/pipeline/pipeline.h"

#include <algorithm>
#include <optional>

#include "device/out_of_memory.h"
#include "parallel/pipeline/simulate.h"
#include "parallel/pipeline/step_schedule.h"

namespace moebius {
namespace {

RankProgram proven(const Schedule& schedule, int64_t pp_rank) {
  simulate(schedule, equal_times(schedule.shape));
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
  rank.one_micro_batch = proven(sequential_schedule(shape, spec.schedule), pp_rank);
  shape.backward = false;
  rank.forward = proven(sequential_schedule(shape), pp_rank);
  shape.backward = true;
  shape.num_micro_batches = spec.num_micro_batches;
  const Schedule step = step_schedule(spec.schedule, shape);
  rank.step = proven(spec.overlap ? step : without_overlap(step), pp_rank);
  return rank;
}

std::vector<HeldStage> PipelineRank::stages() const {
  std::vector<HeldStage> held;
  for (int64_t v = 0; v < layout.num_virtual(); ++v)
    held.push_back({.spec = layout.at(pp_rank, v),
                    .num_saved = step.num_saved_sets[static_cast<size_t>(v)],
                    .splits_backward = step.splits_backward[static_cast<size_t>(v)]});
  return held;
}

Pipeline::Pipeline(const PipelineRank& rank, Model& model, const Mesh& mesh, MemoryPlan& plan)
    : rank_(rank), model_(model), mesh_(mesh) {
  if (is_one_stage()) return;
  buffers_TD_.resize(std::max({rank.step.num_buffers, rank.one_micro_batch.num_buffers, rank.forward.num_buffers}));
  int64_t rows = 0;  // rows of the widest stage here
  for (int64_t v = 0; v < rank.layout.num_virtual(); ++v)
    rows = std::max(rows, buffer_rows(rank.layout.placement().stage_of(rank.pp_rank, v), /*mtp=*/true));
  for (size_t i = 0; i < buffers_TD_.size(); ++i) {
    plan.declare(buffers_TD_[i], fmt::format("pipeline.buffer{}", i), {rows, model.spec().hidden_size}, model.dtype(),
                 Life::saved);
  }
}

void Pipeline::run_step(Stream& s, StepStack& stack, const BatchOf& batch) const { run(s, stack, rank_.step, batch); }

void Pipeline::run_one_micro_batch(Stream& s, StepStack& stack, const MicroBatch& batch) const {
  run(s, stack, rank_.one_micro_batch, [&](int64_t) -> const MicroBatch& { return batch; });
}

void Pipeline::run_forward(Stream& s, StepStack& stack, const MicroBatch& batch) const {
  run(s, stack, rank_.forward, [&](int64_t) -> const MicroBatch& { return batch; });
}

void Pipeline::run_once(Stream& s, StepStack& stack, const MicroBatch& batch) const {
  Step step{s, stack, batch};
  const StagePlacement placement = rank_.layout.placement();
  const int64_t V = placement.num_virtual;
  const auto room_TD = [&](int64_t v) {
    return buffers_TD_[0].rows(0, buffer_rows(placement.stage_of(rank_.pp_rank, v), /*mtp=*/true));
  };
  model_.begin_passes();
  for (int64_t v = 0; v < V; ++v) {
    model_.forward(step, {.virtual_stage = v}, room_TD(v), /*with_gradients=*/true);
    model_.forward_loss(step, {.virtual_stage = v}, /*with_gradients=*/true);
  }
  for (int64_t v = V; v-- > 0;) {
    if (!rank_.step.splits_backward[static_cast<size_t>(v)]) {
      model_.backward(step, {.virtual_stage = v}, room_TD(v));
      continue;
    }
    model_.backward_input(step, {.virtual_stage = v}, room_TD(v));
    model_.backward_weight(step, {.virtual_stage = v});
  }
  model_.end_passes(s);
}

void Pipeline::run_cached(Stream& s, StepStack& stack, const MicroBatch& batch, const CachedTokens& tokens) const {
  Step step{s, stack, batch};
  const int64_t t = tokens.num_tokens / mesh_.shape().tp;
  run(
      s, rank_.forward, [&](int64_t) { return t; }, [&](int64_t) { return t; },
      [&](const PlacedAction& placed, const Tensor& message_tD) {
        StackScope scope(stack);
        const Tensor stream_tD = stream_of(stack, message_tD, t);
        model_.forward_cached(step, {.virtual_stage = rank_.layout.placement().virtual_of(placed.action.stage)},
                              stream_tD, tokens.caches, tokens.rows);
      });
}

// Returns the residual stream that a stage works on: the message, or scratch where no message carries it.
Tensor Pipeline::stream_of(StepStack& stack, const Tensor& message_tD, int64_t rows) const {
  return message_tD.empty() ? stack.alloc({rows, model_.spec().hidden_size}, model_.dtype()) : message_tD;
}

int64_t Pipeline::message_rows(int64_t from_stage, bool mtp) const {
  const bool all = mtp && rank_.layout.mtp_is_apart() && from_stage == std::ssize(rank_.layout.stages) - 2;
  return model_.stream_rows() * (all ? 1 + model_.num_mtp_depths() : 1);
}

int64_t Pipeline::buffer_rows(int64_t stage, bool mtp) const {
  return std::max(message_rows(stage - 1, mtp), message_rows(stage, mtp));
}

void Pipeline::run(Stream& s, StepStack& stack, const RankProgram& list, const BatchOf& batch) const {
  const bool mtp = list.shape.backward;
  model_.begin_passes();
  run(
      s, list, [&](int64_t from_stage) { return message_rows(from_stage, mtp); },
      [&](int64_t stage) { return buffer_rows(stage, mtp); },
      [&](const PlacedAction& placed, const Tensor& stream_tD) {
        Step step{s, stack, batch(placed.action.micro_batch)};
        compute(step, list.shape, placed, stream_tD);
        fetch_next(s, list, placed);
      });
  model_.end_passes(s);
}

// If the next pass is a backward pass, the tensors that it reads first are copied back during the messages before it.
void Pipeline::fetch_next(Stream& s, const RankProgram& list, const PlacedAction& placed) const {
  const auto after = list.actions.begin() + (&placed - list.actions.data()) + 1;
  const auto next =
      std::find_if(after, list.actions.end(), [](const PlacedAction& p) { return p.action.verb == Verb::run; });
  if (next == list.actions.end() || next->action.pass == Pass::forward) return;
  model_.fetch(s, {.virtual_stage = list.shape.virtual_of(next->action.stage), .saved_set = next->saved_set});
}

void Pipeline::run(Stream& s, const RankProgram& list, const RowsOf& of_message, const RowsOf& of_stage,
                   const Compute& compute) const {
  std::vector<Pending> pending(static_cast<size_t>(list.num_buffers));  // each buffer has at most one message in flight
  for (const PlacedAction& placed : list.actions) {
    const auto& [verb, pass, m, stage] = placed.action;
    const bool has_buffer = placed.buffer >= 0, has_memory = has_buffer && !buffers_TD_.empty();
    const Tensor whole_TD = has_memory ? buffers_TD_[placed.buffer] : Tensor{};
    // The message between two stages, in either direction.
    const auto message_TD = [&](int64_t other) { return whole_TD.rows(0, of_message(std::min(stage, other))); };
    const auto pp_rank_of = [&](int64_t of_stage) { return static_cast<int>(list.shape.rank_of(of_stage)); };
    try {
      switch (verb) {
        case Verb::receive:
          pending[placed.buffer] =
              group(pass).recv(s, message_TD(stage - onward(pass)), pp_rank_of(stage - onward(pass)));
          break;
        case Verb::run:
          if (has_buffer) pending[placed.buffer].wait();
          compute(placed, has_memory ? whole_TD.rows(0, of_stage(stage)) : Tensor{});
          break;
        case Verb::send:
          pending[placed.buffer] =
              group(pass).send(s, message_TD(stage + onward(pass)), pp_rank_of(stage + onward(pass)));
          break;
        case Verb::wait:
          pending[placed.buffer].wait();
          break;
      }
    } catch (const OutOfMemory&) {
      throw;  // the engine adds advice
    } catch (const Error& e) {
      if (is_one_stage()) throw;
      throw Error(e.kind(), fmt::format("pipeline, {}: {}", describe(placed.action), e.what()));
    }
  }
}

void Pipeline::compute(Step& step, const PipelineShape& shape, const PlacedAction& placed,
                       const Tensor& message_TD) const {
  const Action& a = placed.action;
  const StagePass at{.virtual_stage = shape.virtual_of(a.stage),
                     .saved_set = placed.saved_set,
                     .backward_follows = placed.backward_follows};
  const char* name[kNumPasses] = {"pipeline forward", "pipeline backward", "pipeline backward weight"};
  std::optional<PhaseScope> phase;
  if (!is_one_stage()) phase.emplace(step.stream, name[static_cast<int>(a.pass)], a.micro_batch);
  if (a.pass == Pass::backward_weight) return model_.backward_weight(step, at);
  {
    StackScope scope(step.stack);
    const Tensor stream_TD = stream_of(step.stack, message_TD, model_.stream_rows());
    if (a.pass == Pass::forward)
      model_.forward(step, at, stream_TD, /*with_gradients=*/shape.backward);
    else if (placed.with_weight)
      model_.backward(step, at, stream_TD);
    else
      model_.backward_input(step, at, stream_TD);
  }
  if (a.pass == Pass::forward) model_.forward_loss(step, at, /*with_gradients=*/shape.backward);
}

}  // namespace moebius
