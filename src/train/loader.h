// The Loader fills micro-batches, for training or for an evaluation.
//
// Training: a batch is a pure function of the step. Sequence i of the global batch is sample (step - 1) * global_batch
// + i, whatever the layout is and however often the run was resumed. Micro-batch j has the sequences j * micro_batch +
// [0, micro_batch), and the dp ranks take micro-batches round-robin. A context rank gets its pieces of each sequence
// (model/attention/token_runs.h); all tp ranks get the same rows.
//   data.order_by_cost   sorts the sequences of the global batch by cost, the largest first. Then the costs of any two
//                        dp ranks differ by no more than those of the largest and the smallest sequence.
//   parallel.dynamic_cp  chooses for each sequence how many cp ranks share it (train/cp_choice.h), and sorts by that
//                        number, then by cost. MicroBatch::cp is the largest number in the micro-batch.
//
// Evaluation: each dataset is read from its start, every sequence once, whatever its weight.
#pragma once

#include <string>
#include <vector>

#include "config/run_spec.h"
#include "data/dataset_order.h"
#include "engine/batch_source.h"
#include "train/cp_choice.h"

namespace moebius {

// Throws Error{input} with the key and what to do when a file of data.train or data.valid is missing. Call it before
// memory is allocated.
void check_datasets_are_there(const DataSpec& data);

// Throws when the run cannot read a dataset: Error{input} when it was built with another tokenizer, or has ids outside
// the model's vocabulary (data/data_build.h); Error{usage} when its completions need data.separate_documents.
// set_by: the key or option that names the dataset; empty: data.tokenizer is named.
void check_dataset(const std::string& prefix, const RunSpec& run, const std::string& set_by);

class Loader final : public BatchSource {
 public:
  // Throws Error{input} for datasets that cannot be read or have no token with a loss, and the errors of
  // check_dataset(). An id outside the vocabulary, of a dataset that does not say its largest id, is Error{input} when
  // it is read.
  // set_by: the key or option that names the datasets, for messages; empty: data.train with shuffle, else data.valid.
  Loader(const std::vector<DatasetSpec>& datasets, const RunSpec& run, bool shuffle, const DataShare& share = {},
         const std::string& set_by = "");

  // Selects the sequences of the global batch of a step (1-based).
  void begin_step(int64_t step) override;
  // Fills this rank's micro-batch m of the step of begin_step().
  void fill(MicroBatch& batch, int64_t m) override;
  // For evaluation: fills in sequences [first, first + count) of one dataset; the rest of the micro-batch has weight 0.
  // count may be 0, on a rank without a micro-batch in this round.
  void fill_pass(MicroBatch& batch, int dataset, int64_t first, int64_t count);

  int64_t num_sequences(int dataset) const { return order_.samples_per_epoch(dataset); }
  // Returns the number of sequences of a dataset that an evaluation of at most max_batches batches of it reads; 0: all.
  int64_t num_evaluated(int dataset, int64_t max_batches) const;
  // Throws Error{input} if no token of the sequences that such an evaluation reads has a loss. `limit` is the key or
  // option of max_batches, for the message.
  void check_evaluation(int64_t max_batches, const std::string& limit) const;
  // Returns one line per dataset (TokenDataset::fingerprint), which must be the same on resume. Reads at most 2 MiB of
  // each dataset.
  std::string fingerprint() const;
  const DatasetOrder& order() const { return order_; }

 private:
  std::vector<int32_t> document_starts(const Sample& sample) const;
  SampleDocuments documents_of(const Sample& sample) const;
  // Sorts samples_ by cost, those that more ranks share first.
  void order_by_cost();
  // The number of ranks that share a sequence of a micro-batch, and the order of the rows of this rank's sequences.
  struct Arranged {
    int64_t sharing;
    std::vector<std::vector<int32_t>> rows;  // [b], of the micro-batch
  };
  Arranged arrange(int64_t m) const;  // arranges micro-batch m
  std::vector<bool> counted_targets(const Sample& sample, const std::vector<int32_t>& starts) const;
  bool any_target(int dataset, int64_t num_sequences) const;  // whether the first sequences of a dataset have one
  void add_weights(const Sample& sample, std::vector<double>& of_depth) const;
  // A sequence whose rows are in the order of `rows`, for this rank's positions in it.
  struct Place {
    int64_t b;
    bool weighted;
    const std::vector<int32_t>& rows;
    const std::vector<int64_t>& positions;
    int64_t length;  // tokens of the parts of the sequence that blocks of cp have
  };
  void fill_sequence(MicroBatch& batch, const Sample& sample, const Place& place);

  DatasetOrder order_;
  DataShare share_;
  std::vector<int64_t> positions_;  // positions in a sequence of the tokens on this rank
  std::vector<int32_t> in_order_;   // 0, 1, 2, ...: the rows of a sequence as they are
  bool dynamic_cp_;
  std::vector<int64_t> sharing_;  // set with dynamic_cp_: the sharing of each of samples_
  int64_t seq_, micro_batch_, global_batch_;
  bool separate_documents_, pack_documents_, order_by_cost_;
  std::vector<Sample> samples_;      // those of the global batch of the step
  double mtp_coeff_ = 0;             // coefficient of each depth of multi-token prediction
  std::vector<double> loss_scales_;  // [depth], depth 0 is the next token
  std::vector<int32_t> tokens_;      // one sample, seq + 1
  int32_t num_segments_ = 0;         // segments of the micro-batch so far
};

}  // namespace moebius
