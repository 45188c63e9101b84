// Fills micro-batches, for training or for an evaluation.
//
// Training: the batch is a pure function of the step. Sample (step - 1) * global_batch + i is
// sequence i of the global batch, whatever the layout and however often the run was resumed. With
// data.order_by_cost the sequences of the global batch are sorted by their cost, the largest first.
// Then the sums of a step over any two dp ranks differ by no more than its largest and its smallest
// sequence do.
// With parallel.dynamic_cp each sequence chooses how many ranks of cp share it (train/cp_choice.h). They are
// sorted by that number and then by their cost, so that those of a micro-batch are alike. The micro-batch has the
// largest number of its sequences, MicroBatch::cp.
// Micro-batch j of the global batch is its sequences j * micro_batch + [0, micro_batch), and the dp
// ranks take them round-robin. A context rank gets its pieces of a sequence
// (model/attention/token_runs.h), and with each row all that multi-token prediction reads and
// predicts there; tp ranks get the same.
// Evaluation: each dataset is read from its start, every sequence once, whatever its weight.
#pragma once

#include <string>
#include <vector>

#include "config/run_spec.h"
#include "data/dataset_order.h"
#include "engine/batch_source.h"
#include "train/cp_choice.h"

namespace moebius {

// Error{input}, naming the key and what to do, when a file of data.train or
// data.valid is missing: before memory is asked for.
void check_datasets_are_there(const DataSpec& data);

class Loader final : public BatchSource {
 public:
  // Error{input} for datasets that cannot be read or whose ids do not fit the
  // vocabulary (when they are met), or that another tokenizer than data.tokenizer
  // built (data/data_build.h: check_tokenizer).
  // `asked_by` is the key or option that names the datasets, for messages;
  // empty: data.train with shuffle, else data.valid.
  Loader(const std::vector<DatasetSpec>& datasets, const RunSpec& run, bool shuffle, const DataShare& share = {},
         const std::string& asked_by = "");

  // Selects the sequences of the global batch of a step (1-based).
  void begin_step(int64_t step) override;
  // This rank's micro-batch m of the step that begin_step() named.
  void fill(MicroBatch& batch, int64_t m) override;
  // Sequences [first, first + count) of one dataset, the rest of the micro-batch without weight;
  // for evaluation. count may be 0, on a rank that has no micro-batch in this round.
  void fill_pass(MicroBatch& batch, int dataset, int64_t first, int64_t count);

  int64_t num_sequences(int dataset) const { return order_.samples_per_epoch(dataset); }
  // One line per dataset (TokenDataset::fingerprint), which an exact resume must find again. Reads
  // at most 2 MiB of each.
  std::string fingerprint() const;
  const DatasetOrder& order() const { return order_; }

 private:
  std::vector<int32_t> document_starts(const Sample& sample) const;
  SampleDocuments documents_of(const Sample& sample) const;
  // Sorts samples_ by cost, those that more ranks share first.
  void order_by_cost();
  // The ranks that share the sequences of this rank's micro-batch from `first` on, and the order of their rows.
  struct Arranged {
    int64_t sharing;
    std::vector<std::vector<int32_t>> rows;  // [b], of the micro-batch
  };
  Arranged arrange(int64_t first) const;
  std::vector<bool> counted_targets(const Sample& sample, const std::vector<int32_t>& starts) const;
  void add_weights(const Sample& sample, std::vector<double>& of_depth) const;
  // A sequence whose rows are in the order of `rows`, for this rank's positions in it.
  struct Place {
    int64_t b;
    bool weighted;
    const std::vector<int32_t>& rows;
    const std::vector<int64_t>& positions;
    int64_t length;  // of the parts of the sequence that blocks of cp have
  };
  void fill_sequence(MicroBatch& batch, const Sample& sample, const Place& place);

  DatasetOrder order_;
  DataShare share_;
  std::vector<int64_t> positions_;  // in a sequence, of its tokens here
  std::vector<int32_t> in_order_;   // 0, 1, 2, ...: the rows of a sequence as they are
  bool dynamic_cp_;
  std::vector<int64_t> sharing_;  // with dynamic_cp_: of each of samples_
  int64_t seq_, micro_batch_, global_batch_;
  bool separate_documents_, pack_documents_, order_by_cost_;
  std::vector<Sample> samples_;      // those of the global batch of the step
  double mtp_coeff_ = 0;             // of each depth of multi-token prediction
  std::vector<double> loss_scales_;  // [depth], depth 0 is the next token
  std::vector<int32_t> tokens_;      // one sample, seq + 1
  int32_t num_segments_ = 0;         // of the micro-batch so far
};

}  // namespace moebius
