// The times of the stages of a layout, from those of their parts.
#pragma once

#include <vector>

#include "plan/search/part_times.h"

namespace moebius {

// The times of a stage for one micro-batch.
struct StageWork {
  PassTime forward, backward;     // forward: with the loss; backward: both of its passes
  PassTime layers_forward;        // the part of forward that is of layers, without embedding, head and loss
  PassTime backward_weight;       // the part of backward that is a pass of its own; zero if the two run as one
  PassTime copies, stored_first;  // once a step (PartTime)
};

// The times of each virtual stage. Stages with the same parts share them.
class StageWorks {
 public:
  size_t size() const { return kind_of_.size(); }
  const StageWork& operator[](size_t stage) const { return kinds_[kind_of_[stage]]; }
  const StageWork& at(size_t stage) const { return kinds_[kind_of_.at(stage)]; }
  const std::vector<StageWork>& kinds() const { return kinds_; }

 private:
  friend StageWorks stage_works(const TimeContext& c, LayoutParts& parts, const StageLayout& layout, PartTimes& times);
  std::vector<StageWork> kinds_;
  std::vector<size_t> kind_of_;  // [virtual stage]
};
StageWorks stage_works(const TimeContext& c, LayoutParts& parts, const StageLayout& layout, PartTimes& times);

// Returns the exposed seconds of a micro-batch's activations that a stage keeps on the host. The copies of these
// bytes to the host overlap with the forward pass, and those back, of which there may be several, with the backward
// pass. In a merged pass both are on the link at once.
double exposed_copies(const TimeContext& c, const StageWork& stage, double bytes, double copies_back);

}  // namespace moebius
