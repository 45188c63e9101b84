#include "parallel/pipeline/placement.h"

#include <algorithm>
#include <numeric>
#include <set>

namespace moebius {
namespace {

// Numbers of buffers or sets. take() returns the lowest free one.
class FreeNumbers {
 public:
  int64_t take() {
    const auto free = std::find(taken_.begin(), taken_.end(), false);
    const int64_t number = free - taken_.begin();
    if (free == taken_.end()) taken_.push_back(false);
    taken_[static_cast<size_t>(number)] = true;
    return number;
  }
  void release(int64_t number) { taken_[static_cast<size_t>(number)] = false; }
  int64_t max_taken() const { return static_cast<int64_t>(taken_.size()); }  // at one time

 private:
  std::vector<bool> taken_;
};

// Gives each action of a rank's list its buffer and its set of saved tensors.
class ActionPlacer {
 public:
  explicit ActionPlacer(const PipelineShape& shape)
      : shape_(shape),
        buffer_of_(shape.num_passes()),
        saved_set_of_(shape.num_passes()),
        saved_sets_(static_cast<size_t>(shape.num_virtual)) {}

  // with_weight: the action is both backward passes.
  PlacedAction add(const Action& a, bool with_weight) {
    switch (a.verb) {
      case Verb::receive:
        return {a, buffer_of(a) = buffers_.take()};
      case Verb::run:
        return a.pass == Pass::backward_weight ? run_weight(a) : run(a, with_weight);
      case Verb::send:
        return {a, buffer_of(a)};
      case Verb::wait:
        buffers_.release(buffer_of(a));
        return {a, buffer_of(a)};
    }
    return {};
  }

  int64_t num_buffers() const { return buffers_.max_taken(); }
  std::vector<int64_t> num_saved_sets() const {
    std::vector<int64_t> counts;
    for (const FreeNumbers& sets : saved_sets_) counts.push_back(sets.max_taken());
    return counts;
  }

 private:
  PlacedAction run(const Action& a, bool with_weight) {
    int64_t& set = saved_set_of(a);
    if (a.pass == Pass::forward) set = sets_of(a).take();
    if (with_weight || !shape_.backward) sets_of(a).release(set);
    if (!shape_.has_input(a.pass, a.stage)) buffer_of(a) = buffers_.take();
    if (!shape_.has_output(a.pass, a.stage)) buffers_.release(buffer_of(a));
    return {a, buffer_of(a), set, with_weight};
  }
  PlacedAction run_weight(const Action& a) {
    sets_of(a).release(saved_set_of(a));
    return {a, -1, saved_set_of(a)};
  }
  FreeNumbers& sets_of(const Action& a) { return saved_sets_[static_cast<size_t>(shape_.virtual_of(a.stage))]; }
  int64_t& saved_set_of(const Action& a) { return saved_set_of_[shape_.index(Pass::forward, a.micro_batch, a.stage)]; }
  int64_t& buffer_of(const Action& a) { return buffer_of_[shape_.index(a.pass, a.micro_batch, a.stage)]; }

  const PipelineShape shape_;
  FreeNumbers buffers_;
  std::vector<int64_t> buffer_of_, saved_set_of_;  // [pass, micro-batch, stage]; saved_set_of_ only of the forward
  std::vector<FreeNumbers> saved_sets_;            // [virtual stage]
};

}  // namespace

std::vector<std::vector<int64_t>> sets_in_use(const RankProgram& program) {
  std::vector<int64_t> now(static_cast<size_t>(program.shape.num_virtual));
  std::set<std::vector<int64_t>> seen;
  for (const PlacedAction& placed : program.actions) {
    const Action& a = placed.action;
    if (a.verb != Verb::run) continue;
    int64_t& count = now[static_cast<size_t>(program.shape.virtual_of(a.stage))];
    if (a.pass == Pass::forward) {
      ++count;
      seen.insert(now);
    } else if (placed.with_weight || a.pass == Pass::backward_weight) {
      --count;
    }
  }
  return {seen.begin(), seen.end()};
}

int64_t most_in_use(const std::vector<std::vector<int64_t>>& sets_in_use, const std::vector<int64_t>& weight_of_stage) {
  int64_t most = 0;
  for (const std::vector<int64_t>& sets : sets_in_use)
    most = std::max(most, std::inner_product(sets.begin(), sets.end(), weight_of_stage.begin(), int64_t{0}));
  return most;
}

namespace {

void mark_backward_follows(std::vector<PlacedAction>& actions) {
  PlacedAction* forward = nullptr;  // the last pass, if it is one
  for (PlacedAction& placed : actions) {
    const Action& a = placed.action;
    if (a.verb != Verb::run) continue;
    if (forward && placed.with_weight)
      forward->backward_follows = a.micro_batch == forward->action.micro_batch && a.stage == forward->action.stage;
    forward = a.pass == Pass::forward ? &placed : nullptr;
  }
}

}  // namespace

RankProgram place_actions(const Schedule& schedule, int64_t pp_rank) {
  const PipelineShape& shape = schedule.shape;
  const std::vector<Action>& actions = schedule.actions[static_cast<size_t>(pp_rank)];
  RankProgram list{.shape = shape, .splits_backward = std::vector<bool>(static_cast<size_t>(shape.num_virtual))};
  ActionPlacer placer(shape);
  for (size_t i = 0; i < actions.size(); ++i) {
    const Action& a = actions[i];
    const Action weight_pass{Verb::run, Pass::backward_weight, a.micro_batch, a.stage};
    const bool with_weight = a.verb == Verb::run && a.pass == Pass::backward_input && i + 1 < actions.size() &&
                             actions[i + 1] == weight_pass;
    list.actions.push_back(placer.add(a, with_weight));
    if (with_weight) ++i;
    if (a.pass == Pass::backward_weight) list.splits_backward[static_cast<size_t>(shape.virtual_of(a.stage))] = true;
  }
  mark_backward_follows(list.actions);
  list.num_buffers = placer.num_buffers();
  list.num_saved_sets = placer.num_saved_sets();
  return list;
}

}  // namespace moebius
