// Schedules for tests of the pipeline.
#pragma once

#include <deque>

#include "parallel/pipeline/schedule.h"

namespace moebius {

// The same passes, but on each rank `count` weight passes are always delayed: the weight pass of a micro-batch
// follows the input passes of `count` later ones. The last ones are at the end.
inline Schedule with_delayed_weights(const Schedule& schedule, int64_t count) {
  Schedule result{schedule.shape, {}};
  for (const std::vector<Action>& list : schedule.actions) {
    std::vector<Action>& actions = result.actions.emplace_back();
    std::deque<Action> waiting;
    const auto run_until_left = [&](int64_t left) {
      for (; std::ssize(waiting) > left; waiting.pop_front()) actions.push_back(waiting.front());
    };
    for (const Action& a : list) {
      if (a.pass == Pass::backward_weight) {
        waiting.push_back(a);
        continue;
      }
      if (a.verb != Verb::send) run_until_left(count);
      actions.push_back(a);
    }
    run_until_left(0);
  }
  return result;
}

}  // namespace moebius
