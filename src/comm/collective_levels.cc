#include "comm/collective_levels.h"

#include "core/error.h"

namespace moebius {

CollectiveLevels::CollectiveLevels(int size, int node) : size_(size) {
  MOEBIUS_ASSERT(size > 0 && node > 0 && node <= kMaxRadix);
  int left = size;
  if (node > 1 && node < size && size % node == 0) {
    radices_.push_back(node);
    left /= node;
  }
  while (left > kMaxRadix) {
    int radix = kMaxRadix;
    while (radix > 1 && left % radix != 0) --radix;
    if (radix == 1) break;
    radices_.push_back(radix);
    left /= radix;
  }
  if (left > 1 || radices_.empty()) radices_.push_back(left);
}

int64_t CollectiveLevels::messages() const {
  int64_t messages = 0;
  for (const int radix : radices_) messages += radix - 1;
  return messages;
}

int CollectiveLevels::digit(int rank, int level) const {
  for (int l = 0; l < level; ++l) rank /= radices_[l];
  return rank % radices_[level];
}

std::vector<int> CollectiveLevels::members(int rank, int level) const {
  int stride = 1;
  for (int l = 0; l < level; ++l) stride *= radices_[l];
  const int first = rank - digit(rank, level) * stride;
  std::vector<int> members;
  for (int d = 0; d < radices_[level]; ++d) members.push_back(first + d * stride);
  return members;
}

int CollectiveLevels::width(int level) const {
  int width = size_;
  for (int l = 0; l <= level; ++l) width /= radices_[l];
  return width;
}

int CollectiveLevels::place(int rank) const {
  int place = 0;
  for (int l = 0; l < count(); ++l) place += digit(rank, l) * width(l);
  return place;
}

int CollectiveLevels::rank_at(int place) const {
  int rank = 0, stride = 1;
  for (int l = 0; l < count(); ++l) {
    rank += place / width(l) * stride;
    place %= width(l);
    stride *= radices_[l];
  }
  return rank;
}

std::vector<LevelStep> CollectiveLevels::steps(int rank) const {
  std::vector<LevelStep> steps;
  int first = 0;
  for (int l = 0; l < count(); ++l) {
    steps.push_back(
        {.level = l, .digit = digit(rank, l), .members = members(rank, l), .first = first, .width = width(l)});
    first = steps.back().begin(steps.back().digit);
  }
  return steps;
}

}  // namespace moebius
