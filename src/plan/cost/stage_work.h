// The times of the stages of a layout, from those of their parts.
#pragma once

#include <vector>

#include "plan/search/part_times.h"

namespace moebius {

// The times of a stage for one micro-batch.
struct StageWork {
  PassTime forward, backward;     // forward: with the loss; backward: both of its passes
  PassTime backward_weight;       // the part of backward that is a pass of its own; zero if the two run as one
  PassTime copies, stored_first;  // once a step (PartTime)
};

// Returns the times of each virtual stage. Stages with the same parts are summed up once.
std::vector<StageWork> stage_works(const TimeContext& c, LayoutParts& parts, const StageLayout& layout,
                                   PartTimes& times);

}  // namespace moebius
