#include "engine/batch_source.h"

#include "model/attention/token_runs.h"

namespace moebius {

SequenceSource::SequenceSource(const RunSpec& run, const DataShare& share)
    : share_(share),
      positions_(positions_of_context(run.train.seq_len, share.cp, share.cp_rank)),
      seq_(run.train.seq_len),
      micro_batch_(run.train.micro_batch),
      global_batch_(run.train.global_batch),
      mtp_coeff_(run.train.mtp_coeff) {}

void SequenceSource::fill(MicroBatch& batch, int64_t m) {
  const int64_t first = (m * share_.dp + share_.dp_rank) * micro_batch_;  // sequence of the global batch
  for (int64_t row = 0; row < micro_batch_; ++row) fill_row(batch, row, first + row);
  fill_scalars(batch.scalars, std::ssize(batch.mtp_targets), first);
  batch.training = true;
}

void SequenceSource::fill_row(MicroBatch& batch, int64_t row, int64_t sequence) const {
  const int64_t step = batch.scalars.step();
  for (int64_t n = 0; n < std::ssize(positions_); ++n) {
    const int64_t at = row * std::ssize(positions_) + n, i = positions_[n];
    batch.token_T.ptr<int32_t>()[at] = token(step, sequence, i);
    for (int64_t k = 0; k <= std::ssize(batch.mtp_targets); ++k) {
      batch.targets(k).target_T.ptr<int32_t>()[at] = i + k < seq_ ? token(step, sequence, i + k + 1) : 0;
      batch.targets(k).weight_T.ptr<float>()[at] = i + k < seq_ ? 1.0f : 0.0f;
    }
    batch.pos_T.ptr<int32_t>()[at] = static_cast<int32_t>(i);
    batch.doc_start_T.ptr<int32_t>()[at] = 0;
    batch.segment_T.ptr<int32_t>()[at] = static_cast<int32_t>(row);
  }
}

void SequenceSource::fill_scalars(StepScalars& scalars, int64_t num_mtp, int64_t first_sequence) const {
  scalars.total_tokens = static_cast<double>(global_batch_ * seq_);
  scalars.set_first_token(first_sequence * seq_);
  scalars.set_loss_scale(0, 1.0 / scalars.total_tokens);
  for (int64_t k = 1; k <= num_mtp; ++k) {
    const double scale = k < seq_ ? 1.0 / static_cast<double>(global_batch_ * (seq_ - k)) : 0.0;
    scalars.set_loss_scale(k, scale, mtp_coeff_ / static_cast<double>(num_mtp));
  }
}

}  // namespace moebius
