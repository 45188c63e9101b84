// Fills micro-batches. Which sample stands where is a pure function of the step: sample (step - 1) * global_batch + i
// is sequence i of the global batch, whatever the layout or how often the run was resumed.
#pragma once

#include <vector>

#include "config/run_spec.h"
#include "io/dataset_order.h"
#include "model/step.h"

namespace moebius {

class Loader {
 public:
  // Error{input} for datasets that cannot be read or whose ids do not fit the vocabulary (when they are met).
  Loader(std::vector<DatasetSpec> datasets, const RunSpec& run, bool shuffle);

  // Sequences of the global batch of a step (1-based): called once a step, before fill().
  void begin_step(int64_t step);
  // Micro-batch m of the step begun: its sequences m * micro_batch + [0, micro_batch). Host tensors.
  void fill(MicroBatch& batch, int64_t m);
  // Sequences [first, first + count) of a pass over the data, the rest of the micro-batch without weight; for
  // evaluation.
  void fill_pass(MicroBatch& batch, int64_t first, int64_t count);

  int64_t num_sequences() const;  // of one pass over the data
  const DatasetOrder& order() const { return order_; }

 private:
  double sequence_weight(int64_t sample);
  void fill_sequence(MicroBatch& batch, int64_t row, int64_t sample, bool weighted);

  DatasetOrder order_;
  int64_t seq_, micro_batch_, global_batch_;
  bool separate_documents_;
  int64_t step_ = 0;
  double loss_scale_ = 0;
  std::vector<int32_t> tokens_;  // one sample, seq + 1
};

}  // namespace moebius
