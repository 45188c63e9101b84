#include "train/loader.h"

#include <algorithm>
#include <filesystem>
#include <numeric>

#include "core/error.h"
#include "data/data_build.h"
#include "model/attention/token_runs.h"

namespace moebius {
namespace {

bool is_missing(const std::string& path) {
  std::error_code error;
  return std::filesystem::status(path, error).type() == std::filesystem::file_type::not_found;
}

void check_is_there(const std::string& prefix, const std::string& tokenizer, const std::string& set_by) {
  refuse_file_for_prefix(prefix, set_by + ": " + prefix);
  const bool is_file = std::filesystem::is_regular_file(prefix);  // text in place of a dataset
  const std::string out = is_file ? std::filesystem::path(prefix).replace_extension().string() : prefix;
  for (const char* ending : {".bin", ".idx"}) {
    MOEBIUS_CHECK(
        input, !is_missing(prefix + ending),
        "{0}: {1}: expected {1}.bin and {1}.idx; {1}{2} is not there; correct the prefix, or make the dataset "
        "with `moebius data build --input {4} --tokenizer {3} --out {5}`{6}",
        set_by, prefix, ending, tokenizer, is_file ? prefix : "FILES", out,
        is_file ? fmt::format(" and name {} here", out) : "");
  }
}

std::vector<WeightedDataset> open_datasets(const std::vector<DatasetSpec>& specs, const std::string& tokenizer,
                                           const std::string& set_by) {
  std::vector<WeightedDataset> datasets;
  for (const DatasetSpec& spec : specs) {
    check_is_there(spec.prefix, tokenizer, set_by);
    datasets.push_back({TokenDataset::open(spec.prefix), spec.weight});
  }
  return datasets;
}

}  // namespace

void check_datasets_are_there(const DataSpec& data) {
  for (const DatasetSpec& d : data.train) check_is_there(d.prefix, data.tokenizer, "data.train");
  for (const DatasetSpec& d : data.valid) check_is_there(d.prefix, data.tokenizer, "data.valid");
}

void check_dataset(const std::string& prefix, const RunSpec& run, const std::string& set_by) {
  check_tokenizer(prefix, run.data.tokenizer, set_by.empty() ? "data.tokenizer" : set_by);
  check_vocabulary(prefix, run.model.vocab_size, set_by.empty() ? "model.vocab_size" : set_by);
  MOEBIUS_CHECK(usage, run.data.separate_documents || !has_target_spans(prefix),
                "data.separate_documents: expected true for {}, whose loss is only on completions; got false; a "
                "completion must not attend to other prompts",
                prefix);
}

Loader::Loader(const std::vector<DatasetSpec>& datasets, const RunSpec& run, bool shuffle, const DataShare& share,
               const std::string& set_by)
    : order_(open_datasets(datasets, run.data.tokenizer,
                           !set_by.empty() ? set_by
                           : shuffle       ? "data.train"
                                           : "data.valid"),
             {.seq_len = run.train.seq_len,
              .vocab_size = run.model.vocab_size,
              .seed = run.seed,
              .shuffle = shuffle,
              .pack_documents = run.data.pack_documents}),
      share_(share),
      positions_(positions_of_context(run.train.seq_len, share.cp, share.cp_rank)),
      in_order_(run.train.seq_len),
      dynamic_cp_(run.parallel.dynamic_cp && share.cp > 1),
      seq_(run.train.seq_len),
      micro_batch_(run.train.micro_batch),
      global_batch_(run.train.global_batch),
      separate_documents_(run.data.separate_documents),
      pack_documents_(run.data.pack_documents),
      order_by_cost_(run.data.order_by_cost),
      mtp_coeff_(run.num_mtp() > 0 ? run.train.mtp_coeff / static_cast<double>(run.num_mtp()) : 0),
      loss_scales_(1 + run.num_mtp()),
      tokens_(seq_ + 1) {
  std::iota(in_order_.begin(), in_order_.end(), 0);
  for (int i = 0; i < order_.num_datasets(); ++i) {
    check_dataset(order_.dataset(i).prefix(), run, set_by);
    MOEBIUS_CHECK(input, any_target(i, num_sequences(i)),
                  "dataset {}: expected a token with a loss that others of its document precede; got none, so there is "
                  "nothing to learn; use another dataset",
                  order_.dataset(i).prefix());
  }
}

int64_t Loader::num_evaluated(int dataset, int64_t max_batches) const {
  const int64_t in_all = num_sequences(dataset);
  return max_batches == 0 ? in_all : std::min(in_all, std::min(max_batches, in_all) * micro_batch_);
}

void Loader::check_evaluation(int64_t max_batches, const std::string& limit) const {
  for (int i = 0; i < order_.num_datasets(); ++i)
    MOEBIUS_CHECK(
        input, any_target(i, num_evaluated(i, max_batches)),
        "dataset {}: expected a token with a loss among {} at its start, which {} = {} evaluates; got none; raise it",
        order_.dataset(i).prefix(), counted(num_evaluated(i, max_batches), "sequence"), limit, max_batches);
}

bool Loader::any_target(int dataset, int64_t num_sequences) const {
  for (int64_t i = 0; i < num_sequences; ++i) {
    const Sample sample = order_.sample_in_order(dataset, i);
    const std::vector<bool> counts = counted_targets(sample, document_starts(sample));
    if (std::find(counts.begin(), counts.end(), true) != counts.end()) return true;
  }
  return false;
}

std::string Loader::fingerprint() const {
  std::string lines;
  for (int i = 0; i < order_.num_datasets(); ++i) lines += order_.dataset(i).fingerprint() + "\n";
  return lines;
}

// Returns the positions in the sequence where documents start; empty unless documents are separated.
std::vector<int32_t> Loader::document_starts(const Sample& sample) const {
  return separate_documents_ ? order_.document_starts(sample) : std::vector<int32_t>{};
}

// Returns for [i] whether token i + 1 is a target. The first token of a document is not.
std::vector<bool> Loader::counted_targets(const Sample& sample, const std::vector<int32_t>& starts) const {
  if (order_.dataset(sample.dataset).has_targets()) return order_.targets(sample);
  std::vector<bool> counts(seq_, true);
  for (const int32_t start : starts) counts[start - 1] = false;
  return counts;
}

// Depth k predicts token j + 1 of a document from row j - k: every target except those of its first
// k rows.
void Loader::add_weights(const Sample& sample, std::vector<double>& of_depth) const {
  std::vector<int32_t> ends = document_starts(sample);
  const bool chosen = order_.dataset(sample.dataset).has_targets();
  const std::vector<bool> counts = chosen ? order_.targets(sample) : std::vector<bool>{};
  ends.push_back(static_cast<int32_t>(seq_ + 1));
  int32_t begin = 0;
  for (const int32_t end : ends) {
    for (int32_t k = 0; k < std::ssize(of_depth) && begin + k < end - 1; ++k)
      of_depth[k] += chosen
                         ? static_cast<double>(std::count(counts.begin() + begin + k, counts.begin() + end - 1, true))
                         : end - 1 - k - begin;
    begin = end;
  }
}

void Loader::begin_step(int64_t step) {
  samples_.clear();
  std::vector<double> weights(loss_scales_.size());
  for (int64_t i = 0; i < global_batch_; ++i) {
    samples_.push_back(order_.sample((step - 1) * global_batch_ + i));
    add_weights(samples_.back(), weights);
  }
  if (order_by_cost_ || dynamic_cp_) order_by_cost();
  for (size_t k = 0; k < weights.size(); ++k) loss_scales_[k] = weights[k] > 0 ? 1.0 / weights[k] : 0.0;
}

// Returns the documents of a sample's rows. The last token of a sequence is only a target, and has no row. Without
// pack_documents, padding is one document.
SampleDocuments Loader::documents_of(const Sample& sample) const {
  const int64_t end = pack_documents_ ? std::min(sample.len, seq_) : seq_;
  SampleDocuments documents{.begins = {0}, .end = static_cast<int32_t>(end), .rows = static_cast<int32_t>(seq_)};
  for (const int32_t start : document_starts(sample)) {
    if (start < documents.end) documents.begins.push_back(start);
  }
  return documents;
}

void Loader::order_by_cost() {
  struct Costly {
    int64_t sharing;
    double cost;
    Sample sample;
  };
  std::vector<Costly> all;
  for (const Sample& sample : samples_) {
    const SampleDocuments documents = documents_of(sample);
    all.push_back({dynamic_cp_ ? choose_sharing(documents, share_.cp) : 0, documents.cost(), sample});
  }
  // Stable: sequences of equal cost remain in the order of the data.
  std::stable_sort(all.begin(), all.end(), [](const Costly& a, const Costly& b) {
    return std::pair(a.sharing, a.cost) > std::pair(b.sharing, b.cost);
  });
  sharing_.clear();
  for (size_t i = 0; i < samples_.size(); ++i) {
    samples_[i] = all[i].sample;
    sharing_.push_back(all[i].sharing);
  }
}

// If documents fit for some number of ranks, the heuristic packing may fail for twice as many. It always succeeds if
// all ranks share a sequence.
// The ranks of dp exchange tokens of experts and gradients in these passes, so they all have the same number.
Loader::Arranged Loader::arrange(int64_t m) const {
  const int64_t count = share_.dp * micro_batch_, first = m * count, own = share_.dp_rank * micro_batch_;
  Arranged arranged{.sharing = *std::max_element(sharing_.begin() + first, sharing_.begin() + first + count)};
  for (int64_t i = 0; i < count;) {
    auto rows = arrange_documents(documents_of(samples_[first + i]), share_.cp, arranged.sharing);
    if (rows) {
      if (i >= own && i < own + micro_batch_) arranged.rows.push_back(std::move(*rows));
      ++i;
    } else {
      arranged.sharing *= 2;
      arranged.rows.clear();
      i = 0;
    }
  }
  return arranged;
}

void Loader::fill(MicroBatch& batch, int64_t m) {
  const int64_t first = (m * share_.dp + share_.dp_rank) * micro_batch_;  // in the global batch
  num_segments_ = 0;
  batch.cp = 0;
  if (dynamic_cp_) {
    const Arranged arranged = arrange(m);
    batch.cp = arranged.sharing;
    const std::vector<int64_t> positions = positions_of_context(seq_, share_.cp, share_.cp_rank, batch.cp);
    for (int64_t b = 0; b < micro_batch_; ++b)
      fill_sequence(batch, samples_[first + b], {b, true, arranged.rows[b], positions, seq_ / share_.cp * batch.cp});
  } else {
    for (int64_t b = 0; b < micro_batch_; ++b)
      fill_sequence(batch, samples_[first + b], {b, true, in_order_, positions_, seq_});
  }
  batch.scalars.set_loss_scale(0, loss_scales_[0]);
  for (int64_t k = 1; k <= std::ssize(batch.mtp_targets); ++k)
    batch.scalars.set_loss_scale(k, loss_scales_[k], mtp_coeff_);
  batch.scalars.total_tokens = static_cast<double>(global_batch_ * seq_);
  batch.scalars.set_first_token(first * seq_);
  batch.training = true;
}

void Loader::fill_pass(MicroBatch& batch, int dataset, int64_t first, int64_t count) {
  const int64_t last = count > 0 ? first + count - 1 : 0;  // read in place of a sequence that does not exist
  num_segments_ = 0;
  batch.cp = 0;
  for (int64_t b = 0; b < micro_batch_; ++b)
    fill_sequence(batch, order_.sample_in_order(dataset, std::min(first + b, last)),
                  {b, b < count, in_order_, positions_, seq_});
  batch.scalars.set_loss_scale(0, 1.0);
  batch.scalars.total_tokens = static_cast<double>(micro_batch_ * seq_);
  // Ranks of dp read one after another; their order is all that evaluation needs.
  batch.scalars.set_first_token(share_.dp_rank * micro_batch_ * seq_);
  batch.training = false;
}

void Loader::fill_sequence(MicroBatch& batch, const Sample& sample, const Place& place) {
  order_.fill(sample, tokens_.data());
  std::vector<int32_t> starts = document_starts(sample);
  const std::vector<bool> counts = counted_targets(sample, starts);
  const auto depths = static_cast<int32_t>(batch.mtp_targets.size());
  const int64_t first_row = place.b * std::ssize(place.positions);
  // One may start after the last token, and is not in a row. document[i] is the document of row i of the sample.
  starts.erase(std::lower_bound(starts.begin(), starts.end(), seq_), starts.end());
  starts.insert(starts.begin(), 0);
  int64_t at = 0;         // the place in the sequence that was reached
  int32_t document = -1;  // how many began up to it, less 1
  size_t of_row = 0;      // the document of the row there, of starts
  for (int64_t n = 0; n < std::ssize(place.positions); ++n) {
    for (; at <= place.positions[n]; ++at) {
      const int32_t i = place.rows[at];
      of_row = static_cast<size_t>(std::upper_bound(starts.begin(), starts.end(), i) - starts.begin()) - 1;
      document += starts[of_row] == i;
    }
    const int64_t here = place.positions[n];
    const int32_t i = place.rows[here], begin = starts[of_row];
    const int64_t end = of_row + 1 < starts.size() ? starts[of_row + 1] : seq_, row = first_row + n;
    batch.token_T.ptr<int32_t>()[row] = tokens_[i];
    for (int32_t k = 0; k <= depths; ++k) {
      const int32_t j = i + k;
      const Targets& targets = batch.targets(k);
      targets.target_T.ptr<int32_t>()[row] = j < seq_ ? tokens_[j + 1] : 0;
      targets.weight_T.ptr<float>()[row] = place.weighted && j < end && counts[j] ? 1.0f : 0.0f;
    }
    batch.pos_T.ptr<int32_t>()[row] = i - begin;
    batch.doc_start_T.ptr<int32_t>()[row] = static_cast<int32_t>(here % place.length) - (i - begin);
    batch.segment_T.ptr<int32_t>()[row] = num_segments_ + document;
  }
  num_segments_ += static_cast<int32_t>(starts.size());
}

}  // namespace moebius
