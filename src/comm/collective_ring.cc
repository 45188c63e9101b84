#include "comm/collective_ring.h"

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace moebius {

std::string to_string(const CollectiveRecord& r) {
  return fmt::format("{} {} of group {} ({} x {})", r.op, r.number, r.group, name_of(r.dtype), r.numel);
}

int64_t CollectiveRing::begin(CollectiveRecord record) {
  const std::lock_guard lock(mutex_);
  records_[num_begun_ % kSize] = std::move(record);
  return num_begun_++;
}

void CollectiveRing::end(int64_t number) {
  const std::lock_guard lock(mutex_);
  if (number >= num_begun_ - kSize) records_[number % kSize].ended = true;  // an older one has left the ring
}

CollectiveRecord CollectiveRing::at(int64_t number) const {
  const std::lock_guard lock(mutex_);
  return records_[number % kSize];
}

CollectiveRecord CollectiveRing::last() const {
  const std::lock_guard lock(mutex_);
  return num_begun_ == 0 ? CollectiveRecord{.op = "start"} : records_[(num_begun_ - 1) % kSize];
}

std::string CollectiveRing::text(int64_t most) const {
  const std::lock_guard lock(mutex_);
  if (num_begun_ == 0) return "  none\n";
  std::string text;
  for (int64_t i = std::max<int64_t>(0, num_begun_ - std::min(most, kSize)); i < num_begun_; ++i) {
    const CollectiveRecord& r = records_[i % kSize];
    text += fmt::format("  {}{}\n", to_string(r), r.ended ? "" : ": not ended");
  }
  return text;
}

}  // namespace moebius
