#include "train/cp_choice.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "core/error.h"
#include "data/bin_packing.h"
#include "model/attention/token_runs.h"

namespace moebius {
namespace {

// More pairs than this many times the least are not worth the exchange that they save.
constexpr double kMaxImbalance = 1.25;

// [row]: the first row of its document.
std::vector<int32_t> document_of_rows(const SampleDocuments& sample) {
  std::vector<int32_t> first(sample.rows);
  std::iota(first.begin(), first.end(), 0);  // padding
  const std::vector<int32_t> lengths = sample.lengths();
  for (size_t i = 0; i < lengths.size(); ++i)
    std::fill_n(first.begin() + sample.begins[i], lengths[i], sample.begins[i]);
  return first;
}

}  // namespace

std::vector<int32_t> SampleDocuments::lengths() const {
  std::vector<int32_t> lengths;
  for (size_t i = 0; i < begins.size(); ++i)
    lengths.push_back((i + 1 < begins.size() ? begins[i + 1] : end) - begins[i]);
  return lengths;
}

double SampleDocuments::cost() const {
  double cost = rows - end;
  for (const int32_t length : lengths()) cost += static_cast<double>(length) * length;
  return cost;
}

std::optional<std::vector<int32_t>> arrange_documents(const SampleDocuments& sample, int64_t cp, int64_t sharing) {
  MOEBIUS_ASSERT(cp % sharing == 0 && sample.rows % cp == 0);
  std::vector<int32_t> order(sample.rows);
  std::iota(order.begin(), order.end(), 0);
  if (sharing == cp) return order;
  const std::vector<int32_t> lengths = sample.lengths();
  const int64_t num_bins = cp / sharing, capacity = sample.rows / num_bins;
  const auto bins = bin_documents(lengths, capacity, num_bins);
  if (!bins) return std::nullopt;
  int64_t at = 0;
  int32_t padding = sample.end;
  for (int64_t bin = 0; bin < num_bins; ++bin) {
    for (const int32_t document : (*bins)[bin]) {
      for (int32_t i = 0; i < lengths[document]; ++i) order[at++] = sample.begins[document] + i;
    }
    while (at < (bin + 1) * capacity) order[at++] = padding++;
  }
  return order;
}

double busiest_rank(const SampleDocuments& sample, const std::vector<int32_t>& order, int64_t cp, int64_t sharing) {
  const std::vector<int32_t> first = document_of_rows(sample);
  double most = 0;
  for (int64_t rank = 0; rank < cp; ++rank) {
    double pairs = 0;
    for (const int64_t at : positions_of_context(sample.rows, cp, rank, sharing))
      pairs += order[at] - first[order[at]] + 1;
    most = std::max(most, pairs);
  }
  return most;
}

int64_t choose_sharing(const SampleDocuments& sample, int64_t cp) {
  std::vector<double> busiest;  // [i]: with 2^i ranks
  for (int64_t sharing = 1; sharing <= cp; sharing *= 2) {
    const auto order = arrange_documents(sample, cp, sharing);
    busiest.push_back(order ? busiest_rank(sample, *order, cp, sharing) : std::numeric_limits<double>::infinity());
  }
  const double least = *std::min_element(busiest.begin(), busiest.end());
  const auto chosen =
      std::find_if(busiest.begin(), busiest.end(), [&](double pairs) { return pairs <= kMaxImbalance * least; });
  return int64_t{1} << (chosen - busiest.begin());
}

}  // namespace moebius
