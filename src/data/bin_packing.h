// Packs the documents of a sample into sequences of equal length, so that fewer ranks share a document.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace moebius {

// Returns for each of `num_bins` bins the indices of its documents, ascending; or nothing where they did not fit.
// A bin has room for `capacity` tokens, and no document is cut. The longest go first, each to the bin with the
// least cost that has room: the cost of a document is the square of its length, as in attention (longest
// processing time first, Graham 1969). Where that fails, each goes to the bin with the least room that takes it
// (best fit decreasing). The result depends on the arguments alone.
std::optional<std::vector<std::vector<int32_t>>> bin_documents(std::span<const int32_t> lengths, int64_t capacity,
                                                               int64_t num_bins);

}  // namespace moebius
