// The tokens on which benchmarks of whole steps train.
#pragma once

#include "engine/batch_source.h"

namespace moebius {

// Random ids. The global batch is a pure function of (seed, step).
class RandomSequences final : public SequenceSource {
 public:
  explicit RandomSequences(const RunSpec& run, const DataShare& share = {});
  int32_t token(int64_t step, int64_t sequence, int64_t i) const override;

 private:
  uint64_t seed_;
  int64_t seq_, vocab_;
};

}  // namespace moebius
