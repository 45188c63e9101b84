#include <array>

#include "core/error.h"
#include "parallel/pipeline/simulate.h"

namespace moebius {

namespace {

// The actions of one rank up to now, each at most once.
class RankLog {
 public:
  RankLog(const PipelineShape& shape, int64_t pp_rank) : shape_(shape), pp_rank_(pp_rank) {
    for (auto& done : done_) done.resize(shape.num_passes());
  }

  void add(const Action& a) {
    check_place(a);
    MOEBIUS_CHECK(usage, shape_.backward || a.pass == Pass::forward,
                  "simulate: rank {} lists {}; the schedule has only forward passes", pp_rank_, describe(a));
    const bool takes = shape_.has_input(a.pass, a.stage), leaves = shape_.has_output(a.pass, a.stage);
    const bool exists = a.verb == Verb::run || (a.verb == Verb::receive ? takes : leaves);
    MOEBIUS_CHECK(usage, exists, "simulate: rank {} lists {}, which has no such message", pp_rank_, describe(a));
    MOEBIUS_CHECK(usage, !done(a), "simulate: rank {} lists {} twice", pp_rank_, describe(a));
    if (a.verb == Verb::run) {
      if (a.micro_batch > 0) check_follows(a, {Verb::run, a.pass, a.micro_batch - 1, a.stage});
      if (a.pass == Pass::backward_input) check_follows(a, {Verb::run, Pass::forward, a.micro_batch, a.stage});
      if (a.pass == Pass::backward_weight) check_follows(a, {Verb::run, Pass::backward_input, a.micro_batch, a.stage});
      if (takes) check_follows(a, {Verb::receive, a.pass, a.micro_batch, a.stage});
    }
    if (a.verb == Verb::send) check_follows(a, {Verb::run, a.pass, a.micro_batch, a.stage});
    if (a.verb == Verb::wait) check_follows(a, {Verb::send, a.pass, a.micro_batch, a.stage});
    done_[static_cast<size_t>(a.verb)][index(a)] = true;
  }

  // A wait requires its send, both require the run, and a run requires its receive.
  void check_complete() const {
    for (int64_t v = 0; v < shape_.num_virtual; ++v) {
      for (int64_t m = 0; m < shape_.num_micro_batches; ++m) check_micro_batch(m, shape_.stage_of(pp_rank_, v));
    }
  }

 private:
  size_t index(const Action& a) const { return shape_.index(a.pass, a.micro_batch, a.stage); }
  bool done(const Action& a) const { return done_[static_cast<size_t>(a.verb)][index(a)]; }

  void check_micro_batch(int64_t m, int64_t stage) const {
    for (const Pass pass : {Pass::forward, Pass::backward_input, Pass::backward_weight}) {
      if (pass != Pass::forward && !shape_.backward) continue;
      const Verb last = shape_.has_output(pass, stage) ? Verb::wait : Verb::run;
      const Action a = {last, pass, m, stage};
      MOEBIUS_CHECK(usage, done(a), "simulate: rank {} must list {}; it never does", pp_rank_, describe(a));
    }
  }
  void check_place(const Action& a) const {
    const bool exists =
        a.micro_batch >= 0 && a.micro_batch < shape_.num_micro_batches && a.stage >= 0 && a.stage < shape_.num_stages();
    MOEBIUS_CHECK(usage, exists, "simulate: rank {} lists {}; there are {} micro-batches and {} stages", pp_rank_,
                  describe(a), shape_.num_micro_batches, shape_.num_stages());
    MOEBIUS_CHECK(usage, shape_.rank_of(a.stage) == pp_rank_, "simulate: rank {} lists {}, which is of rank {}",
                  pp_rank_, describe(a), shape_.rank_of(a.stage));
  }
  void check_follows(const Action& a, const Action& before) const {
    MOEBIUS_CHECK(usage, done(before), "simulate: rank {} must list {} before {}", pp_rank_, describe(before),
                  describe(a));
  }

  PipelineShape shape_;
  int64_t pp_rank_;
  std::array<std::vector<bool>, 4> done_;  // [verb][pass, micro-batch, stage]
};

// Returns the messages of a pass as their senders or their receivers list them, each by the action that
// receives it: [from rank * P + to rank].
std::vector<std::vector<Action>> channels_at(const Schedule& schedule, Verb end, Pass pass) {
  const PipelineShape& shape = schedule.shape;
  std::vector<std::vector<Action>> channels(static_cast<size_t>(shape.num_ranks * shape.num_ranks));
  for (const std::vector<Action>& list : schedule.actions) {
    for (Action a : list) {
      if (a.verb != end || a.pass != pass) continue;
      if (end == Verb::send) a = {Verb::receive, pass, a.micro_batch, a.stage + onward(pass)};
      const int64_t from = shape.rank_of(a.stage - onward(pass)), to = shape.rank_of(a.stage);
      channels[static_cast<size_t>(from * shape.num_ranks + to)].push_back(a);
    }
  }
  return channels;
}

// REQUIRES: every list is complete, so that both ends have the same messages.
void check_channels(const Schedule& schedule, Pass pass) {
  const auto sent = channels_at(schedule, Verb::send, pass), received = channels_at(schedule, Verb::receive, pass);
  for (size_t c = 0; c < sent.size(); ++c) {
    for (size_t i = 0; i < sent[c].size(); ++i) {
      const Action &from_sender = sent[c][i], &at_receiver = received[c][i];
      MOEBIUS_CHECK(
          usage, from_sender == at_receiver,
          "simulate: both ends of a channel must list its messages in the same order; message {} from rank {} is "
          "sent for {}, where rank {} lists {}",
          i, static_cast<int64_t>(c) / schedule.shape.num_ranks, describe(from_sender),
          schedule.shape.rank_of(at_receiver.stage), describe(at_receiver));
    }
  }
}

}  // namespace

void check_actions(const Schedule& schedule) {
  const PipelineShape& shape = schedule.shape;
  shape.check();
  MOEBIUS_CHECK(usage, std::ssize(schedule.actions) == shape.num_ranks,
                "simulate: a schedule of {} ranks must have as many lists; got {}", shape.num_ranks,
                schedule.actions.size());
  for (int64_t pp_rank = 0; pp_rank < shape.num_ranks; ++pp_rank) {
    RankLog log(shape, pp_rank);
    for (const Action& action : schedule.actions[static_cast<size_t>(pp_rank)]) log.add(action);
    log.check_complete();
  }
  for (const Pass pass : {Pass::forward, Pass::backward_input}) check_channels(schedule, pass);
}

}  // namespace moebius
