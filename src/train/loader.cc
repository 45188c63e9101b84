#include "train/loader.h"

#include <algorithm>
#include <filesystem>

#include "core/error.h"

namespace moebius {
namespace {

bool is_missing(const std::string& path) {
  std::error_code error;
  return std::filesystem::status(path, error).type() == std::filesystem::file_type::not_found;
}

TokenDataset open_dataset(const std::string& prefix, const std::string& asked_by) {
  for (const char* ending : {".bin", ".idx"}) {
    MOEBIUS_CHECK(
        input, !is_missing(prefix + ending),
        "{0}: {1}: expected {1}.bin and {1}.idx; {1}{2} is not there; correct the prefix, or make the dataset "
        "with `moebius data build --out {1}`",
        asked_by, prefix, ending);
  }
  return TokenDataset::open(prefix);
}

std::vector<WeightedDataset> open_datasets(const std::vector<DatasetSpec>& specs, const std::string& asked_by) {
  std::vector<WeightedDataset> datasets;
  for (const DatasetSpec& spec : specs) datasets.push_back({open_dataset(spec.prefix, asked_by), spec.weight});
  return datasets;
}

}  // namespace

Loader::Loader(const std::vector<DatasetSpec>& datasets, const RunSpec& run, bool shuffle, const DataRank& at,
               const std::string& asked_by)
    : order_(open_datasets(datasets, !asked_by.empty() ? asked_by
                                     : shuffle         ? "data.train"
                                                       : "data.valid"),
             {.seq_len = run.train.seq_len, .vocab_size = run.model.vocab_size, .seed = run.seed, .shuffle = shuffle}),
      at_(at),
      seq_(run.train.seq_len),
      micro_batch_(run.train.micro_batch),
      global_batch_(run.train.global_batch),
      separate_documents_(run.data.separate_documents),
      tokens_(seq_ + 1) {}

std::string Loader::fingerprint() const {
  std::string lines;
  for (int i = 0; i < order_.num_datasets(); ++i) lines += order_.dataset(i).fingerprint() + "\n";
  return lines;
}

// Targets that count: with documents apart, the first token of a document is nobody's target.
double Loader::sequence_weight(const Sample& sample) const {
  if (!separate_documents_) return static_cast<double>(seq_);
  return static_cast<double>(seq_) - static_cast<double>(order_.document_starts(sample).size());
}

void Loader::begin_step(int64_t step) {
  step_ = step;
  samples_.clear();
  double weight = 0;
  for (int64_t i = 0; i < global_batch_; ++i) {
    samples_.push_back(order_.sample((step - 1) * global_batch_ + i));
    weight += sequence_weight(samples_.back());
  }
  loss_scale_ = weight > 0 ? 1.0 / weight : 0.0;
}

void Loader::fill(MicroBatch& batch, int64_t m) {
  const int64_t first = (m * at_.size + at_.rank) * micro_batch_;  // in the global batch
  for (int64_t row = 0; row < micro_batch_; ++row) fill_sequence(batch, row, samples_[first + row], true);
  batch.loss_scale = loss_scale_;
  batch.total_tokens = static_cast<double>(global_batch_ * seq_);
  batch.train_step = static_cast<uint64_t>(step_);
  batch.first_token = static_cast<uint64_t>(first * seq_);
  batch.training = true;
}

void Loader::fill_pass(MicroBatch& batch, int dataset, int64_t first, int64_t count) {
  const int64_t last = count > 0 ? first + count - 1 : 0;  // what stands in for a sequence where there is none
  for (int64_t row = 0; row < micro_batch_; ++row)
    fill_sequence(batch, row, order_.sample_in_order(dataset, std::min(first + row, last)), row < count);
  batch.loss_scale = 1.0;
  batch.total_tokens = static_cast<double>(micro_batch_ * seq_);
  batch.training = false;
}

void Loader::fill_sequence(MicroBatch& batch, int64_t row, const Sample& sample, bool weighted) {
  order_.fill(sample, tokens_.data());
  std::vector<int32_t> starts;
  if (separate_documents_) starts = order_.document_starts(sample);
  int32_t* token = batch.token_T.ptr<int32_t>() + row * seq_;
  int32_t* target = batch.target_T.ptr<int32_t>() + row * seq_;
  float* weight = batch.weight_T.ptr<float>() + row * seq_;
  int32_t* pos = batch.pos_T.ptr<int32_t>() + row * seq_;
  int32_t* doc_start = batch.doc_start_T.ptr<int32_t>() + row * seq_;
  int32_t* segment = batch.segment_T.ptr<int32_t>() + row * seq_;
  const int32_t first_segment = row == 0 ? 0 : segment[-1] + 1;
  size_t next = 0;  // starts[next] is the next document
  int32_t begin = 0;
  for (int32_t i = 0; i < seq_; ++i) {
    if (next < starts.size() && starts[next] == i) {
      begin = i;
      ++next;
    }
    const bool target_starts_document = next < starts.size() && starts[next] == i + 1;
    token[i] = tokens_[i];
    target[i] = tokens_[i + 1];
    weight[i] = weighted && !target_starts_document ? 1.0f : 0.0f;
    pos[i] = i - begin;
    doc_start[i] = begin;
    segment[i] = first_segment + static_cast<int32_t>(next);
  }
}

}  // namespace moebius
