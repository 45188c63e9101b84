#include "parallel/pipeline/action_list.h"

#include <algorithm>
#include <array>

namespace moebius {
namespace {

class ListBuilder {
 public:
  ListBuilder(const PipelineShape& shape, const std::vector<Turn>& order, int64_t early_inputs)
      : shape_(shape), early_inputs_(early_inputs) {
    for (const Turn& turn : order) {
      if (shape.has_input(turn.pass, turn.stage)) lane(turn.pass).inputs.push_back(turn);
    }
    for (const Turn& turn : order) add(turn);
    for (Lane& lane : lanes_) {
      while (lane.num_waited < std::ssize(lane.results)) wait(lane);
    }
  }

  std::vector<Action> actions;

 private:
  // The messages of one pass: the received and the sent ones.
  struct Lane {
    std::vector<Turn> inputs, results;
    int64_t num_opened = 0, num_used = 0, num_waited = 0;
  };

  Lane& lane(Pass pass) { return lanes_[static_cast<size_t>(pass)]; }
  void add(Verb verb, const Turn& turn) { actions.push_back({verb, turn.pass, turn.micro_batch, turn.stage}); }

  void add(const Turn& turn) {
    if (turn.pass == Pass::backward_weight) return add(Verb::run, turn);  // it has no messages
    Lane& own = lane(turn.pass);
    const bool sends = shape_.has_output(turn.pass, turn.stage);
    if (shape_.has_input(turn.pass, turn.stage)) ++own.num_used;
    for (Lane& lane : lanes_) open(lane);
    if (sends && std::ssize(own.results) - own.num_waited == kMaxSendsInFlight) wait(own);
    add(Verb::run, turn);
    if (turn.with_weight) add(Verb::run, {Pass::backward_weight, turn.micro_batch, turn.stage});
    if (!sends) return;
    add(Verb::send, turn);
    own.results.push_back(turn);
  }

  void open(Lane& lane) {
    const int64_t end = std::min(std::ssize(lane.inputs), lane.num_used + early_inputs_);
    while (lane.num_opened < end) add(Verb::receive, lane.inputs[lane.num_opened++]);
  }
  void wait(Lane& lane) { add(Verb::wait, lane.results[lane.num_waited++]); }

  static constexpr int64_t kMaxSendsInFlight = 2;
  const PipelineShape& shape_;
  const int64_t early_inputs_;
  std::array<Lane, 2> lanes_;
};

}  // namespace

std::vector<Action> actions_in_order(const PipelineShape& shape, const std::vector<Turn>& order, int64_t early_inputs) {
  return ListBuilder(shape, order, early_inputs).actions;
}

}  // namespace moebius
