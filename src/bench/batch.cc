#include "bench/batch.h"

#include "core/rng.h"
#include "model/attention/token_runs.h"

namespace moebius {

void fill_bench_batch(MicroBatch& batch, const RunSpec& run, int64_t step, int64_t m, const DataShare& share) {
  const int64_t S = run.train.seq_len, B = run.train.micro_batch, V = run.model.vocab_size;
  const int64_t first = (m * share.dp + share.dp_rank) * B;  // the first sequence of the global batch
  const std::vector<int64_t> positions = positions_of_context(S, share.cp, share.cp_rank);
  const Rng rng(run.seed, RngSite::bench, static_cast<uint64_t>(step));
  for (int64_t row = 0; row < B; ++row) {
    const int64_t sample = first + row;
    for (int64_t n = 0; n < std::ssize(positions); ++n) {
      const int64_t at = row * std::ssize(positions) + n, i = positions[n];
      const auto id = [&](int64_t k) {
        return static_cast<int32_t>(rng.below(static_cast<uint64_t>(sample * (S + 1) + k), static_cast<uint64_t>(V)));
      };
      batch.token_T.ptr<int32_t>()[at] = id(i);
      for (int64_t k = 0; k <= std::ssize(batch.mtp_targets); ++k) {
        batch.targets(k).target_T.ptr<int32_t>()[at] = i + k < S ? id(i + k + 1) : 0;
        batch.targets(k).weight_T.ptr<float>()[at] = i + k < S ? 1.0f : 0.0f;
      }
      batch.pos_T.ptr<int32_t>()[at] = static_cast<int32_t>(i);
      batch.doc_start_T.ptr<int32_t>()[at] = 0;
      batch.segment_T.ptr<int32_t>()[at] = static_cast<int32_t>(row);
    }
  }
  const double tokens = static_cast<double>(run.train.global_batch * S);
  batch.loss_scale = 1.0 / tokens;
  const auto depths = static_cast<int64_t>(batch.mtp_targets.size());
  if (depths > 0) batch.mtp_coeff = run.train.mtp_coeff / static_cast<double>(depths);
  for (int64_t k = 1; k <= depths; ++k)
    batch.mtp_targets[k - 1].loss_scale = k < S ? 1.0 / static_cast<double>(run.train.global_batch * (S - k)) : 0.0;
  batch.total_tokens = tokens;
  batch.train_step = static_cast<uint64_t>(step);
  batch.first_token = static_cast<uint64_t>(first * S);
  batch.training = true;
}

}  // namespace moebius
