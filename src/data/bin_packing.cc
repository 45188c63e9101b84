#include "data/bin_packing.h"

#include <algorithm>
#include <numeric>

namespace moebius {
namespace {

struct Bin {
  int64_t room;
  double cost = 0;
  std::vector<int32_t> documents;
};

// Returns the bin for a document of this length: the one that `better` prefers, of those with enough free tokens; null
// if there is none.
template <class Better>
Bin* best_bin(std::vector<Bin>& bins, int64_t length, Better&& better) {
  Bin* best = nullptr;
  for (Bin& bin : bins) {
    if (bin.room >= length && (best == nullptr || better(bin, *best))) best = &bin;
  }
  return best;
}

template <class Better>
std::optional<std::vector<std::vector<int32_t>>> pack(std::span<const int32_t> lengths,
                                                      const std::vector<int32_t>& order, std::vector<Bin> bins,
                                                      Better&& better) {
  for (const int32_t document : order) {
    const int64_t length = lengths[document];
    Bin* bin = best_bin(bins, length, better);
    if (bin == nullptr) return std::nullopt;
    bin->room -= length;
    bin->cost += static_cast<double>(length) * static_cast<double>(length);
    bin->documents.push_back(document);
  }
  std::vector<std::vector<int32_t>> packed;
  for (Bin& bin : bins) {
    std::sort(bin.documents.begin(), bin.documents.end());
    packed.push_back(std::move(bin.documents));
  }
  return packed;
}

}  // namespace

std::optional<std::vector<std::vector<int32_t>>> bin_documents(std::span<const int32_t> lengths, int64_t capacity,
                                                               int64_t num_bins) {
  std::vector<int32_t> order(lengths.size());
  std::iota(order.begin(), order.end(), 0);
  // Stable: documents of one length stay in the order of the data.
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return lengths[a] > lengths[b]; });
  const std::vector<Bin> empty(static_cast<size_t>(num_bins), Bin{.room = capacity});
  auto packed = pack(lengths, order, empty, [](const Bin& a, const Bin& b) { return a.cost < b.cost; });
  if (!packed) packed = pack(lengths, order, empty, [](const Bin& a, const Bin& b) { return a.room < b.room; });
  return packed;
}

}  // namespace moebius
