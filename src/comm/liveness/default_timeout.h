// The time for which a rank waits for another where no timeout was set: 600 s until the rank's first
// step is done, and from then on 60 s longer than its longest step so far.
// A rank counts its own steps, from the one to the other end. So a rank that is late by less than a
// minute ends no run, and one that hangs is found a minute later than any slow step.
#pragma once

namespace moebius {

// Belongs to the thread of one rank.
class DefaultTimeout {
 public:
  struct Options {
    double before_steps_s = 600, beyond_step_s = 60;
  };

  // While one exists, the rank does work between steps, such as a checkpoint, which may take longer than any step.
  class BetweenSteps {
   public:
    explicit BetweenSteps(DefaultTimeout& timeout) : timeout_(timeout) { ++timeout_.num_between_steps_; }
    ~BetweenSteps() { --timeout_.num_between_steps_; }
    BetweenSteps(const BetweenSteps&) = delete;

   private:
    DefaultTimeout& timeout_;
  };

  // Returns the timeout, in tenths of a second. Between steps it is at least before_steps_s.
  double seconds(const Options& options) const;
  void step_done(double seconds);  // seconds: the duration of the step
  [[nodiscard]] BetweenSteps between_steps() { return BetweenSteps(*this); }

 private:
  double longest_step_s_ = -1;  // below 0: no step is done
  int num_between_steps_ = 0;
};

}  // namespace moebius
