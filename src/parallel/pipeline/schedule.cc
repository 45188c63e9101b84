#include "parallel/pipeline/schedule.h"

#include <algorithm>
#include <array>

#include "core/error.h"

namespace moebius {

namespace {

// A forward; or a backward, named by its first pass.
struct Turn {
  Pass pass = Pass::forward;
  int64_t micro_batch = 0, stage = 0;
};

// One pass of all micro-batches through the virtual stages of a rank: for each group of G micro-batches, for each
// virtual stage, the micro-batches of the group.
std::vector<Turn> turns_of(const PipelineShape& shape, int64_t pp_rank, Pass pass) {
  const int64_t P = shape.num_ranks, V = shape.num_virtual, M = shape.num_micro_batches;
  const int64_t G = V == 1 ? M : shape.group_size();
  std::vector<Turn> turns;
  for (int64_t begin = 0; begin < M; begin += G) {
    for (int64_t i = 0; i < V; ++i) {
      const int64_t v = pass == Pass::forward ? i : V - 1 - i;
      for (int64_t m = begin; m < std::min(begin + G, M); ++m) turns.push_back({pass, m, v * P + pp_rank});
    }
  }
  return turns;
}

std::vector<Turn> compute_order(const PipelineShape& shape, int64_t pp_rank) {
  const std::vector<Turn> forwards = turns_of(shape, pp_rank, Pass::forward);
  const std::vector<Turn> backwards = turns_of(shape, pp_rank, Pass::backward_input);
  const int64_t warmup = num_warmup_forwards(shape, pp_rank);
  std::vector<Turn> order(forwards.begin(), forwards.begin() + warmup);
  for (int64_t i = 0; i < std::ssize(backwards); ++i) {
    if (warmup + i < std::ssize(forwards)) order.push_back(forwards[warmup + i]);
    order.push_back(backwards[i]);
  }
  return order;
}

std::vector<Turn> order_in_turn(const PipelineShape& shape, int64_t pp_rank) {
  const int64_t P = shape.num_ranks, V = shape.num_virtual;
  std::vector<Turn> order;
  for (int64_t m = 0; m < shape.num_micro_batches; ++m) {
    for (int64_t v = 0; v < V; ++v) order.push_back({Pass::forward, m, v * P + pp_rank});
    for (int64_t v = V; shape.backward && v-- > 0;) order.push_back({Pass::backward_input, m, v * P + pp_rank});
  }
  return order;
}

// Puts a rank's receives, sends and waits between its passes.
class ListBuilder {
 public:
  // ahead: how many later inputs of the same pass are open when one is used.
  ListBuilder(const PipelineShape& shape, const std::vector<Turn>& order, int64_t ahead)
      : shape_(shape), ahead_(ahead) {
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
  // The messages of one pass: those that it receives, and those that it sends.
  struct Lane {
    std::vector<Turn> inputs, results;
    int64_t num_opened = 0, num_used = 0, num_waited = 0;
  };

  Lane& lane(Pass pass) { return lanes_[static_cast<size_t>(pass)]; }
  void add(Verb verb, const Turn& turn) { actions.push_back({verb, turn.pass, turn.micro_batch, turn.stage}); }

  void add(const Turn& turn) {
    Lane& own = lane(turn.pass);
    const bool sends = shape_.has_output(turn.pass, turn.stage);
    if (shape_.has_input(turn.pass, turn.stage)) ++own.num_used;
    for (Lane& lane : lanes_) open(lane);
    if (sends && std::ssize(own.results) - own.num_waited == kResultsOnTheirWay) wait(own);
    add(Verb::run, turn);
    if (turn.pass == Pass::backward_input) add(Verb::run, {Pass::backward_weight, turn.micro_batch, turn.stage});
    if (!sends) return;
    add(Verb::send, turn);
    own.results.push_back(turn);
  }

  void open(Lane& lane) {
    const int64_t end = std::min(std::ssize(lane.inputs), lane.num_used + ahead_);
    while (lane.num_opened < end) add(Verb::receive, lane.inputs[lane.num_opened++]);
  }
  void wait(Lane& lane) { add(Verb::wait, lane.results[lane.num_waited++]); }

  static constexpr int64_t kResultsOnTheirWay = 2;
  const PipelineShape& shape_;
  const int64_t ahead_;
  std::array<Lane, 2> lanes_;
};

void check_interleaving(const PipelineShape& shape) {
  const int64_t P = shape.num_ranks, V = shape.num_virtual, M = shape.num_micro_batches, G = shape.group_size();
  if (V == 1) return;
  MOEBIUS_CHECK(usage, P <= G && G <= M,
                "pipeline: vpp = {} needs pp <= group <= micro-batches; got {} <= {} <= {}; raise the micro-batches of "
                "a step (global batch / (micro-batch * dp)) or set vpp = 1",
                V, P, G, M);
  MOEBIUS_CHECK(usage, M % G == 0 || M % G >= P,
                "pipeline: vpp = {} needs micro-batches mod group = 0 or >= pp = {}; got {} mod {} = {}; change the "
                "micro-batches of a step (global batch / (micro-batch * dp)) or set vpp = 1",
                V, P, M, G, M % G);
}

}  // namespace

std::string describe(const Action& action) {
  const char* verb[] = {"the receive for ", "", "the send after ", "the wait for the send after "};
  const char* pass[kNumPasses] = {"forward", "input backward", "weight backward"};
  return fmt::format("{}{} of micro-batch {}, stage {}", verb[static_cast<int>(action.verb)],
                     pass[static_cast<int>(action.pass)], action.micro_batch, action.stage);
}

void PipelineShape::check() const {
  MOEBIUS_CHECK(usage, num_ranks >= 1 && num_virtual >= 1 && num_micro_batches >= 1,
                "pipeline: ranks, virtual stages and micro-batches must be at least 1; "
                "got pp = {}, vpp = {}, {} micro-batches",
                num_ranks, num_virtual, num_micro_batches);
  MOEBIUS_CHECK(usage, num_virtual == 1 || num_ranks > 1,
                "pipeline: vpp > 1 splits the stages of a pipeline, pp > 1; got pp = 1, vpp = {}", num_virtual);
}

int64_t num_warmup_forwards(const PipelineShape& shape, int64_t pp_rank) {
  const int64_t V = shape.num_virtual, behind = shape.num_ranks - pp_rank - 1;
  const int64_t warmup = V == 1 ? behind : 2 * behind + (V - 1) * shape.group_size();
  return std::min(warmup, V * shape.num_micro_batches);
}

Schedule schedule_1f1b(const PipelineShape& shape) {
  shape.check();
  check_interleaving(shape);
  MOEBIUS_ASSERT(shape.backward);
  const int64_t ahead = shape.num_virtual == 1 ? 1 : 1 + shape.group_size() - shape.num_ranks;
  Schedule schedule{shape, {}};
  for (int64_t pp_rank = 0; pp_rank < shape.num_ranks; ++pp_rank)
    schedule.actions.push_back(ListBuilder(shape, compute_order(shape, pp_rank), ahead).actions);
  return schedule;
}

Schedule sequential_schedule(const PipelineShape& shape) {
  shape.check();
  Schedule schedule{shape, {}};
  for (int64_t pp_rank = 0; pp_rank < shape.num_ranks; ++pp_rank)
    schedule.actions.push_back(ListBuilder(shape, order_in_turn(shape, pp_rank), 1).actions);
  return schedule;
}

Schedule without_overlap(const Schedule& schedule) {
  Schedule result{schedule.shape, {}};
  for (const std::vector<Action>& list : schedule.actions) {
    std::vector<Action>& actions = result.actions.emplace_back();
    for (const Action& a : list) {
      if (a.verb == Verb::wait) continue;
      actions.push_back(a);
      if (a.verb == Verb::send) actions.push_back({Verb::wait, a.pass, a.micro_batch, a.stage});
    }
  }
  return result;
}

}  // namespace moebius
