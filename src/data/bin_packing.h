// Packs the documents of a sample into sequences of equal length, so that fewer ranks share a document.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace moebius {

// Assigns documents to `num_bins` bins of `capacity` tokens each; no document is cut. Returns the indices of each bin's
// documents, ascending, or nothing if they did not fit.
// Documents are assigned from the longest to the shortest. Each is put into the bin with the least cost of those with
// enough free tokens; the cost of a document is the square of its length, as in attention (longest processing time
// first, Graham 1969). If that fails, each is put into the bin with the fewest free tokens that can hold it (best fit
// decreasing). The result depends only on the arguments.
std::optional<std::vector<std::vector<int32_t>>> bin_documents(std::span<const int32_t> lengths, int64_t capacity,
                                                               int64_t num_bins);

}  // namespace moebius
