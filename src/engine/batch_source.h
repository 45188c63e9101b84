// A BatchSource provides the micro-batches of a step. The engine requests them one by one, each before its pass.
#pragma once

#include <vector>

#include "config/run_spec.h"
#include "model/step.h"

namespace moebius {

// A rank's share of a global batch. Micro-batch m of the rank is micro-batch m * dp + dp_rank of the global batch. Of
// each sequence the rank has the tokens of its context rank (model/attention/token_runs.h).
struct DataShare {
  int64_t dp_rank = 0, dp = 1, cp_rank = 0, cp = 1;
};

class BatchSource {
 public:
  virtual ~BatchSource() = default;
  // Called once a step (1-based), before its first fill().
  virtual void begin_step(int64_t /*step*/) {}
  // Fills this rank's micro-batch m of the step, in host memory: every tensor of tensors_of() except scalars_memory;
  // `training`; and the scalars except step and learning rate, which the engine has set.
  virtual void fill(MicroBatch& batch, int64_t m) = 0;
};

// A source of whole sequences without documents. The targets of a token are the tokens that follow it.
class SequenceSource : public BatchSource {
 public:
  explicit SequenceSource(const RunSpec& run, const DataShare& share = {});
  // Returns token i of a sequence of the global batch of a step. i is in [0, seq_len]: the last one is only a target.
  virtual int32_t token(int64_t step, int64_t sequence, int64_t i) const = 0;
  void fill(MicroBatch& batch, int64_t m) override;

 private:
  void fill_row(MicroBatch& batch, int64_t row, int64_t sequence) const;
  void fill_scalars(StepScalars& scalars, int64_t num_mtp, int64_t first_sequence) const;

  DataShare share_;
  std::vector<int64_t> positions_;  // positions in a sequence of the tokens on this rank
  int64_t seq_, micro_batch_, global_batch_;
  double mtp_coeff_;
};

}  // namespace moebius
