// Dynamic cp: how many ranks share the sequences of a micro-batch, and which of its documents each block of
// ranks has (model/attention/token_runs.h).
//
// A sample of S rows on cp ranks is one sequence of S rows that all of them share, or cp / c sequences of S c / cp
// rows, each shared by c neighbours. Its documents must fit into these sequences whole. The fewer ranks share a
// document, the less they exchange; c = 1 exchanges nothing.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace moebius {

// The documents of a sample: document i has the rows [begins[i], begins[i + 1]), the last one those up to `end`.
// The rows [end, rows) are padding, of which each row is a document.
struct SampleDocuments {
  std::vector<int32_t> begins;
  int32_t end = 0, rows = 0;
  std::vector<int32_t> lengths() const;
  double cost() const;  // the sum of squared lengths, and 1 for a row of padding
};

// Returns the row of the sample at each place of the arranged one, [rows]; or nothing where the documents do not fit.
// With sharing = cp it is 0, 1, 2, ... The padding fills what the documents leave.
// REQUIRES: sharing divides cp, and 2 cp the rows.
std::optional<std::vector<int32_t>> arrange_documents(const SampleDocuments& sample, int64_t cp, int64_t sharing);

// Pairs of a query and a key that it sees, on the busiest of the cp ranks.
double busiest_rank(const SampleDocuments& sample, const std::vector<int32_t>& order, int64_t cp, int64_t sharing);

// Returns the smallest power of two whose busiest rank has at most 1.25 times the pairs of the best one's.
// REQUIRES: cp is a power of two.
int64_t choose_sharing(const SampleDocuments& sample, int64_t cp);

}  // namespace moebius
