// Dynamic context parallelism: chooses how many ranks share the sequences of a micro-batch, and assigns documents to
// blocks of ranks (model/attention/token_runs.h).
//
// A sample of S rows on cp ranks is one sequence of S rows that all ranks share, or cp / c sequences of S c / cp rows,
// each shared by c consecutive ranks. Every document must fit into one of these sequences. The fewer ranks share a
// document, the less they communicate; with c = 1 they do not communicate.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace moebius {

// The documents of a sample. Document i has the rows [begins[i], begins[i + 1]), and the last one ends at `end`. Rows
// [end, rows) are padding, and each of them is a document of its own.
struct SampleDocuments {
  std::vector<int32_t> begins;
  int32_t end = 0, rows = 0;
  std::vector<int32_t> lengths() const;
  double cost() const;  // the sum of squared lengths, and 1 for a row of padding
};

// Returns an order of the rows of the sample in which documents fit the sequences, [rows]; nothing if there is none.
// With sharing = cp it is 0, 1, 2, ... Padding fills the gaps. REQUIRES: sharing divides cp, and 2 cp divides the rows.
std::optional<std::vector<int32_t>> arrange_documents(const SampleDocuments& sample, int64_t cp, int64_t sharing);

// Returns the number of (query, attended key) pairs on the busiest of the cp ranks.
double busiest_rank(const SampleDocuments& sample, const std::vector<int32_t>& order, int64_t cp, int64_t sharing);

// Returns the smallest power of two with which the busiest rank has at most 1.25 times the pairs of the best choice.
// REQUIRES: cp is a power of two.
int64_t choose_sharing(const SampleDocuments& sample, int64_t cp);

}  // namespace moebius
