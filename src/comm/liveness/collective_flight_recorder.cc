#include "comm/liveness/collective_flight_recorder.h"

#include <algorithm>
#include <utility>

#include "core/error.h"

namespace moebius {

std::string to_string(const CollectiveRecord& r) {
  return fmt::format("{} {} of group {} ({} x {})", r.op, r.number, r.group, name_of(r.dtype), r.numel);
}

int64_t CollectiveFlightRecorder::begin(CollectiveRecord record) {
  const std::lock_guard lock(mutex_);
  CollectiveRecord& place = records_[num_begun_ % kSize];
  if (num_begun_ >= kSize && !place.ended) open_.emplace(num_begun_ - kSize, std::move(place));
  place = std::move(record);
  return num_begun_++;
}

void CollectiveFlightRecorder::end(int64_t number) {
  const std::lock_guard lock(mutex_);
  if (number >= num_begun_ - kSize)
    records_[number % kSize].ended = true;
  else
    open_.erase(number);
}

CollectiveRecord CollectiveFlightRecorder::at(int64_t number) const {
  const std::lock_guard lock(mutex_);
  const auto open = open_.find(number);
  return open == open_.end() ? records_[number % kSize] : open->second;
}

CollectiveRecord CollectiveFlightRecorder::last() const {
  const std::lock_guard lock(mutex_);
  return num_begun_ == 0 ? CollectiveRecord{.op = "start"} : records_[(num_begun_ - 1) % kSize];
}

std::string CollectiveFlightRecorder::text(int64_t max_records) const {
  const std::lock_guard lock(mutex_);
  if (num_begun_ == 0) return "  none\n";
  std::string text;
  const auto add = [&text](const CollectiveRecord& r) {
    text += fmt::format("  {}{}\n", to_string(r), r.ended ? "" : ": not ended");
  };
  for (const auto& [number, record] : open_) add(record);
  const int64_t first_in_ring = std::max<int64_t>(0, num_begun_ - kSize), first_of_last = num_begun_ - max_records;
  for (int64_t i = first_in_ring; i < num_begun_; ++i) {
    const CollectiveRecord& r = records_[i % kSize];
    if (i >= first_of_last || !r.ended) add(r);
  }
  return text;
}

}  // namespace moebius
