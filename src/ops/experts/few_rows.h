// expert_down for few rows, as when text is generated. Its time is then that of reading the weights.
#pragma once

#include "ops/experts/experts.h"

namespace moebius {

// expert_down after an expert_up of the same rows. The results are those of expert_down. With few_rows a Hopper GPU
// reads w2 while expert_up runs; without few_rows, and on other devices, this is expert_down. REQUIRES: expert_up ran
// before on the stream with these offsets, and nothing has written the offsets or w2 since expert_up was called.
void expert_down_after_up(Stream& s, const ExpertDown& a);

}  // namespace moebius
