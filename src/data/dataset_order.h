// The order in which training reads its datasets. It is a pure function of (seed, sample index).
// So a resumed run needs the index only, and every rank computes its samples without
// the other ranks.
//
// A sample is seq_len + 1 tokens. Sample s of a dataset reads tokens [s seq_len, s seq_len +
// seq_len]. Neighbours share one token: the last target of one is the first input of the next.
// Each pass over a dataset (an epoch) visits its samples in a new random order. A blend picks the
// dataset by weight (data/blend.h).
// The last (tokens - 1) % seq_len tokens are not read.
//
// A dataset that says which tokens are targets (data/target_spans.h) is read by whole documents
// instead (data/packing.h).
// Such a sample may be shorter than seq_len + 1. It is padded with its own tokens as one more
// document, so that routers get text. With pack_documents every dataset is read in this way, and each token
// of the padding is a document: so the position of a document never changes how its tokens are computed.
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
  int64_t len = 0;    // seq_len + 1, or less for packed documents
  int64_t epoch = 0;  // number of the pass over the dataset
};

class DatasetOrder {
 public:
  struct Options {
    int64_t seq_len = 0;
    int64_t vocab_size = 0;  // the model's; fill() refuses other ids
    uint64_t seed = 0;
    bool shuffle = true;  // if false, reads from the front, for evaluation
    bool pack_documents = false;
  };

  // Throws Error{usage} for a dataset with less than seq_len + 1 tokens, unless its
  // documents are packed.
  DatasetOrder(std::vector<WeightedDataset> datasets, const Options& options);

  int num_datasets() const { return static_cast<int>(datasets_.size()); }
  const TokenDataset& dataset(int i) const { return datasets_[i].data; }
  int64_t samples_per_epoch(int i) const;
  // Returns the number of targets at the end of dataset i that do not fill a sample and are not read. 0
  // if documents are packed.
  int64_t num_left_out(int i) const;
  // Returns whether the samples of dataset i are whole documents.
  bool is_packed(int i) const { return options_.pack_documents || dataset(i).has_targets(); }

  // Returns a sample of the blend. This is not for several threads at once, since a blend keeps its
  // position. Going backwards is exact, but may walk far (data/blend.h). So keep the samples of a
  // step that are needed twice.
  Sample sample(int64_t global_index);
  // Returns sample `index` of one dataset from its front, without blend and shuffle. It is for
  // reading each dataset once.
  Sample sample_in_order(int dataset, int64_t index) const;
  // Writes the sample's seq_len + 1 ids. Throws Error{input} for an id outside the vocabulary.
  void fill(const Sample& sample, int32_t* tokens) const;
  Sample fill(int64_t global_index, int32_t* tokens);

  // Returns the positions p in [1, seq_len] of the sample where a document begins, sorted
  // and without duplicates. Position 0 is never listed, even where a document begins there.
  std::vector<int32_t> document_starts(const Sample& sample) const;
  // Returns for i in [0, seq_len) whether token i + 1 of the sample has a loss. REQUIRES: the dataset
  // has targets.
  // The loss is never on the first token of a document, because no token before it predicts it.
  std::vector<bool> targets(const Sample& sample) const;

 private:
  std::vector<WeightedDataset> datasets_;
  std::vector<std::vector<TokenSpan>> packed_;  // samples of the datasets that are packed
  Options options_;
  Blend blend_;
};

}  // namespace moebius
