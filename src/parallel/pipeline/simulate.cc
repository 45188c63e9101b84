#include "parallel/pipeline/simulate.h"

#include <algorithm>
#include <optional>

#include "core/error.h"

namespace moebius {

namespace {

struct Message {
  std::optional<double> opened, sent, arrived;  // when
};

class Simulation {
 public:
  Simulation(const Schedule& schedule, const PipelineTimes& times)
      : schedule_(schedule),
        shape_(schedule.shape),
        times_(times),
        place_(schedule.actions.size()),
        clock_(schedule.actions.size()),
        messages_(shape_.num_passes()),
        channels_(2 * schedule.actions.size() * schedule.actions.size()) {
    result_.shape = shape_;
    result_.ranks.resize(schedule.actions.size());
  }

  SimulatedSchedule run() {
    for (bool moved = true; moved;) {
      moved = false;
      for (int64_t r = 0; r < shape_.num_ranks; ++r) {
        while (!finished(r) && step(r, at(r))) {
          ++place_[r];
          moved = true;
        }
      }
    }
    for (int64_t r = 0; r < shape_.num_ranks; ++r) {
      if (!finished(r)) fail_deadlock(r);
    }
    result_.duration = *std::max_element(clock_.begin(), clock_.end());
    return std::move(result_);
  }

 private:
  bool finished(int64_t r) const { return place_[r] == schedule_.actions[r].size(); }
  const Action& at(int64_t r) const { return schedule_.actions[r][place_[r]]; }

  // Executes the action if rank r can do so now; returns whether it did.
  bool step(int64_t r, const Action& a) {
    switch (a.verb) {
      case Verb::receive:
        input_of(a).opened = clock_[r];
        move(input_of(a), a.pass, a.stage - onward(a.pass));
        return true;
      case Verb::send:
        result_of(a).sent = clock_[r];
        move(result_of(a), a.pass, a.stage);
        return true;
      case Verb::wait:
        return wait_for(r, result_of(a));
      case Verb::run:
        if (shape_.has_input(a.pass, a.stage) && !wait_for(r, input_of(a))) return false;
        compute(r, a);
        return true;
    }
    return false;
  }

  // A message is identified by the pass and stage that send it.
  Message& result_of(const Action& a) { return messages_[shape_.index(a.pass, a.micro_batch, a.stage)]; }
  Message& input_of(const Action& a) {
    return messages_[shape_.index(a.pass, a.micro_batch, a.stage - onward(a.pass))];
  }

  // Both ends list a channel's messages in the same order, so the one before has moved when this one can.
  void move(Message& message, Pass pass, int64_t from_stage) {
    if (!message.opened || !message.sent) return;
    const int64_t P = shape_.num_ranks;
    const int64_t from = shape_.rank_of(from_stage), to = shape_.rank_of(from_stage + onward(pass));
    double& channel = channels_[(static_cast<int64_t>(pass) * P + from) * P + to];
    channel = std::max({channel, *message.opened, *message.sent}) + times_.transfer;
    message.arrived = channel;
  }

  bool wait_for(int64_t r, const Message& message) {
    if (message.arrived) clock_[r] = std::max(clock_[r], *message.arrived);
    return message.arrived.has_value();
  }

  void compute(int64_t r, const Action& a) {
    const StageTime& time = times_.stages[a.stage];
    const double begin = clock_[r], took = time.of(a.pass);
    clock_[r] += took;
    result_.ranks[r].busy += took;
    result_.ranks[r].runs.push_back({a, begin, clock_[r]});
  }

  // A rank that is stuck waits for exactly one other, so following them leads into a cycle.
  [[noreturn]] void fail_deadlock(int64_t r) const {
    std::vector<int64_t> path;
    while (std::find(path.begin(), path.end(), r) == path.end()) {
      path.push_back(r);
      r = awaited(at(r));
    }
    std::string cycle;
    for (auto it = std::find(path.begin(), path.end(), r); it != path.end(); ++it) {
      cycle += fmt::format("{}rank {} is at {} and waits for rank {}", cycle.empty() ? "" : "; ", *it,
                           describe(at(*it)), awaited(at(*it)));
    }
    MOEBIUS_FAIL(usage, "simulate: the schedule deadlocks: {}", cycle);
  }
  int64_t awaited(const Action& a) const {
    return shape_.rank_of(a.verb == Verb::wait ? a.stage + onward(a.pass) : a.stage - onward(a.pass));
  }

  const Schedule& schedule_;
  const PipelineShape shape_;
  const PipelineTimes& times_;
  std::vector<size_t> place_;      // [pp_rank], in its list
  std::vector<double> clock_;      // [pp_rank]
  std::vector<Message> messages_;  // [pass, micro-batch, stage]
  std::vector<double> channels_;   // [pass, from rank, to rank], when the last message had moved
  SimulatedSchedule result_;
};

// Micro-batches between the start of their forward and the end of their last pass.
void count_in_flight(const PipelineShape& shape, const std::vector<Action>& actions, RankSimulation& rank) {
  const Pass last = shape.backward ? Pass::backward_weight : Pass::forward;
  std::vector<int64_t> of_stage(static_cast<size_t>(shape.num_virtual));
  rank.peak_of_stage = of_stage;
  int64_t in_flight = 0;
  for (const Action& a : actions) {
    if (a.verb != Verb::run) continue;
    const size_t v = static_cast<size_t>(shape.virtual_of(a.stage));
    if (a.pass == Pass::forward) ++in_flight, ++of_stage[v];
    rank.peak_in_flight = std::max(rank.peak_in_flight, in_flight);
    rank.peak_of_stage[v] = std::max(rank.peak_of_stage[v], of_stage[v]);
    if (a.pass == last) --in_flight, --of_stage[v];
  }
}

void count_messages(const PipelineShape& shape, const std::vector<Action>& actions, RankSimulation& rank) {
  int64_t receives = 0, sends = 0;
  for (const Action& a : actions) {
    if (a.verb == Verb::receive) ++receives;
    if (a.verb == Verb::send) ++sends;
    if (a.verb == Verb::wait) --sends;
    if (a.verb == Verb::run && shape.has_input(a.pass, a.stage)) --receives;
    rank.peak_receives = std::max(rank.peak_receives, receives);
    rank.peak_sends = std::max(rank.peak_sends, sends);
  }
}

void check_times(const PipelineShape& shape, const PipelineTimes& times) {
  MOEBIUS_CHECK(usage, std::ssize(times.stages) == shape.num_stages(),
                "simulate: times must be given for pp * vpp = {} stages; got {}", shape.num_stages(),
                times.stages.size());
  double least = times.transfer;
  for (const StageTime& stage : times.stages)
    least = std::min({least, stage.forward, stage.backward_input, stage.backward_weight});
  MOEBIUS_CHECK(usage, least >= 0, "simulate: times must not be negative; got {}", least);
}

}  // namespace

double StageTime::of(Pass pass) const {
  if (pass == Pass::forward) return forward;
  return pass == Pass::backward_input ? backward_input : backward_weight;
}

PipelineTimes equal_times(const PipelineShape& shape, const StageTime& stage, double transfer) {
  return {std::vector<StageTime>(static_cast<size_t>(shape.num_stages()), stage), transfer};
}

double SimulatedSchedule::bubble() const {
  double busy = 0;
  for (const RankSimulation& rank : ranks) busy += rank.busy;
  return duration > 0 ? 1 - busy / (static_cast<double>(shape.num_ranks) * duration) : 0;
}

SimulatedSchedule simulate(const Schedule& schedule, const PipelineTimes& times) {
  check_actions(schedule);
  check_times(schedule.shape, times);
  SimulatedSchedule result = Simulation(schedule, times).run();
  for (size_t r = 0; r < result.ranks.size(); ++r) {
    count_in_flight(schedule.shape, schedule.actions[r], result.ranks[r]);
    count_messages(schedule.shape, schedule.actions[r], result.ranks[r]);
  }
  return result;
}

namespace {

// Returns the text where a run begins; empty where it continues the backward before it.
std::string label_of(const std::vector<RankSimulation::Run>& runs, size_t i, const PipelineShape& shape) {
  const Action& a = runs[i].action;
  const Action input_pass{Verb::run, Pass::backward_input, a.micro_batch, a.stage};
  const bool weight = a.pass == Pass::backward_weight;
  if (weight && runs[i - 1].action == input_pass && runs[i - 1].end == runs[i].begin) return "";
  const char first = a.pass == Pass::forward ? 'a' : 'A';
  const int64_t virtual_stage = shape.virtual_of(a.stage);
  return fmt::format("{}{}{}", static_cast<char>(first + virtual_stage % 26), a.micro_batch, weight ? "w" : "");
}

}  // namespace

std::string picture(const SimulatedSchedule& simulated, double unit) {
  MOEBIUS_CHECK(usage, unit > 0, "picture: the unit of time must be positive; got {}", unit);
  const auto column = [&](double time) { return static_cast<size_t>(time / unit + 0.5); };
  size_t width = 1 + fmt::formatted_size("{}", simulated.shape.num_micro_batches - 1);
  for (const RankSimulation& rank : simulated.ranks)
    for (size_t i = 0; i < rank.runs.size(); ++i)
      width = std::max(width, label_of(rank.runs, i, simulated.shape).size());
  std::string lines;
  for (size_t r = 0; r < simulated.ranks.size(); ++r) {
    const std::vector<RankSimulation::Run>& runs = simulated.ranks[r].runs;
    std::vector<std::string> cells(column(simulated.duration), ".");
    for (size_t i = 0; i < runs.size(); ++i) {
      for (size_t c = column(runs[i].begin); c < column(runs[i].end); ++c) cells[c] = std::string(width, '-');
      if (column(runs[i].begin) == column(runs[i].end)) continue;  // too short to be seen
      const std::string label = label_of(runs, i, simulated.shape);
      if (!label.empty()) cells[column(runs[i].begin)] = label;
    }
    std::string line = fmt::format("rank {}", r);
    for (const std::string& cell : cells) line += fmt::format(" {:<{}}", cell, width);
    lines += line.erase(line.find_last_not_of(' ') + 1) + "\n";
  }
  return lines;
}

}  // namespace moebius
