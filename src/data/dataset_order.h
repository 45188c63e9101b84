// The order in which training reads its datasets, as a pure function of (seed, sample index): nothing to store, nothing
// to resume but the index itself, and every rank computes the samples it needs alone.
//
// A sample is seq_len + 1 tokens. Sample s of a dataset reads tokens [s seq_len, s seq_len + seq_len], so that
// neighbours share one token: the target of the one is the first input of the next. Each pass over a dataset (an epoch)
// visits its samples in another random order; a blend of datasets picks by weight (data/blend.h). The last (tokens - 1) %
// seq_len tokens are not read.
//
// A dataset that says which tokens are targets (data/target_spans.h) is read by whole documents instead
// (data/packing.h): a sample may then be shorter, and is filled up with its own tokens again, as one more document, so
// that what routers see is text.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "data/blend.h"
#include "data/token_data.h"

namespace moebius {

struct WeightedDataset {
  TokenDataset data;
  double weight = 1;
};

struct Sample {
  int dataset = 0;
  int64_t token_begin = 0;
  int64_t len = 0;    // seq_len + 1, or less of packed documents
  int64_t epoch = 0;  // of the dataset
};

class DatasetOrder {
 public:
  struct Options {
    int64_t seq_len = 0;
    int64_t vocab_size = 0;  // of the model: fill() refuses other ids
    uint64_t seed = 0;
    bool shuffle = true;  // off: from the front, for evaluation
  };

  // Error{usage} for a dataset with less than seq_len + 1 tokens, unless its documents are packed.
  DatasetOrder(std::vector<WeightedDataset> datasets, const Options& options);

  int num_datasets() const { return static_cast<int>(datasets_.size()); }
  const TokenDataset& dataset(int i) const { return datasets_[i].data; }
  int64_t samples_per_epoch(int i) const;

  // Not for several threads at once: a blend keeps its place. Going backwards is exact, but may walk far (data/blend.h):
  // keep the samples of a step that are needed twice.
  Sample sample(int64_t global_index);
  // Sample `index` of one dataset from its front, whatever the blend and the shuffle: to read each set once.
  Sample sample_in_order(int dataset, int64_t index) const;
  // Writes the sample's seq_len + 1 ids. Error{input} for an id outside the vocabulary.
  void fill(const Sample& sample, int32_t* tokens) const;
  Sample fill(int64_t global_index, int32_t* tokens);

  // Positions p in [1, seq_len] of the sample where a document begins; one may begin at 0 unsaid. Rises, no duplicates.
  std::vector<int32_t> document_starts(const Sample& sample) const;
  // Of a dataset that has targets: whether the loss is on token i + 1 of the sample, for i in [0, seq_len). Not on the
  // first token of a document, which nothing before it foretells.
  std::vector<bool> targets(const Sample& sample) const;

 private:
  std::vector<WeightedDataset> datasets_;
  std::vector<std::vector<TokenSpan>> packed_;  // samples of the datasets that have targets
  Options options_;
  Blend blend_;
};

}  // namespace moebius
