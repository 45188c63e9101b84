#include "bench/batch.h"

#include "core/rng.h"

namespace moebius {

RandomSequences::RandomSequences(const RunSpec& run, const DataShare& share)
    : SequenceSource(run, share), seed_(run.seed), seq_(run.train.seq_len), vocab_(run.model.vocab_size) {}

int32_t RandomSequences::token(int64_t step, int64_t sequence, int64_t i) const {
  const Rng rng(seed_, RngSite::bench, static_cast<uint64_t>(step));
  const auto index = static_cast<uint64_t>(sequence * (seq_ + 1) + i);
  return static_cast<int32_t>(rng.below(index, static_cast<uint64_t>(vocab_)));
}

}  // namespace moebius
