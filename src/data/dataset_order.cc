#include "data/dataset_order.h"

#include <algorithm>

#include "core/error.h"
#include "core/rng.h"
#include "data/packing.h"
#include "data/permutation.h"

namespace moebius {
namespace {

std::vector<double> weights_of(const std::vector<WeightedDataset>& datasets) {
  std::vector<double> weights;
  for (const WeightedDataset& d : datasets) weights.push_back(d.weight);
  return weights;
}

}  // namespace

DatasetOrder::DatasetOrder(std::vector<WeightedDataset> datasets, const Options& options)
    : datasets_(std::move(datasets)), options_(options), blend_(weights_of(datasets_)) {
  MOEBIUS_CHECK(usage, options.seq_len > 0, "dataset order: expected seq_len > 0; got {}; set train.seq_len",
                options.seq_len);
  MOEBIUS_CHECK(usage, options.vocab_size > 0, "dataset order: expected vocab_size > 0; got {}; set model.vocab_size",
                options.vocab_size);
  for (const WeightedDataset& d : datasets_) {
    packed_.emplace_back();
    const bool is_packed = options.pack_documents || d.data.has_targets();
    if (is_packed) packed_.back() = pack_documents(d.data.document_begins(), options.seq_len);
    MOEBIUS_CHECK(
        usage, is_packed || d.data.num_tokens() > options.seq_len,
        "dataset order: expected more than seq_len = {} tokens in {}; got {}; lower train.seq_len or add text",
        options.seq_len, d.data.prefix(), d.data.num_tokens());
  }
}

int64_t DatasetOrder::samples_per_epoch(int i) const {
  if (is_packed(i)) return static_cast<int64_t>(packed_[i].size());
  return (dataset(i).num_tokens() - 1) / options_.seq_len;
}

int64_t DatasetOrder::num_left_out(int i) const {
  return is_packed(i) ? 0 : (dataset(i).num_tokens() - 1) % options_.seq_len;
}

Sample DatasetOrder::sample(int64_t global_index) {
  const Blend::Pick pick = blend_.at(global_index);
  const int64_t per_epoch = samples_per_epoch(pick.dataset);
  const int64_t epoch = pick.ordinal / per_epoch;
  int64_t index = pick.ordinal % per_epoch;
  if (options_.shuffle) {
    const Rng rng(options_.seed, RngSite::data_order, static_cast<uint64_t>(epoch),
                  static_cast<uint32_t>(pick.dataset));
    index = permuted(index, per_epoch, rng);
  }
  Sample s = sample_in_order(pick.dataset, index);
  s.epoch = epoch;
  return s;
}

Sample DatasetOrder::sample_in_order(int dataset, int64_t index) const {
  if (is_packed(dataset)) {
    const TokenSpan span = packed_[dataset][index];
    return {.dataset = dataset, .token_begin = span.begin, .len = span.end - span.begin};
  }
  return {.dataset = dataset, .token_begin = index * options_.seq_len, .len = options_.seq_len + 1};
}

void DatasetOrder::fill(const Sample& sample, int32_t* tokens) const {
  const TokenDataset& data = dataset(sample.dataset);
  data.read(sample.token_begin, sample.len, tokens);
  check_token_ids({tokens, static_cast<size_t>(sample.len)}, options_.vocab_size, sample.token_begin, data.prefix());
  for (int64_t i = sample.len; i <= options_.seq_len; ++i) tokens[i] = tokens[i - sample.len];
}

Sample DatasetOrder::fill(int64_t global_index, int32_t* tokens) {
  const Sample s = sample(global_index);
  fill(s, tokens);
  return s;
}

std::vector<int32_t> DatasetOrder::document_starts(const Sample& sample) const {
  const std::span<const int64_t> begins = dataset(sample.dataset).document_begins();
  const int64_t end = std::min(sample.token_begin + sample.len, begins.back());
  std::vector<int32_t> starts;
  for (auto it = std::upper_bound(begins.begin(), begins.end(), sample.token_begin); it != begins.end() && *it < end;
       ++it) {
    const auto position = static_cast<int32_t>(*it - sample.token_begin);
    if (starts.empty() || starts.back() != position) starts.push_back(position);  // an empty one has the same begin
  }
  // The padding begins at len. It is one document, or as many as it has tokens.
  const int64_t last = options_.pack_documents ? options_.seq_len : std::min(sample.len, options_.seq_len);
  for (int64_t at = sample.len; at <= last; ++at) starts.push_back(static_cast<int32_t>(at));
  return starts;
}

std::vector<bool> DatasetOrder::targets(const Sample& sample) const {
  const std::span<const TokenSpan> spans = dataset(sample.dataset).target_spans();
  const int64_t begin = sample.token_begin + 1, end = sample.token_begin + sample.len;
  std::vector<bool> targets(options_.seq_len);
  const auto ends_later = [](int64_t at, const TokenSpan& span) { return at < span.end; };
  for (auto span = std::upper_bound(spans.begin(), spans.end(), begin, ends_later);
       span != spans.end() && span->begin < end; ++span) {
    for (int64_t t = std::max(begin, span->begin); t < std::min(end, span->end); ++t) targets[t - begin] = true;
  }
  for (const int32_t start : document_starts(sample)) targets[start - 1] = false;
  return targets;
}

}  // namespace moebius
