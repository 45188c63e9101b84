// TensorBoard event files with scalars and histograms, written without protobuf. Each record is
//   u64 length | u32 masked crc of the length | Event | u32 masked crc of the Event
// where masked(c) rotates crc32c(c) right by 15 bits and adds 0xa282ead8.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "io/files.h"

namespace moebius {

class TensorboardWriter {
 public:
  // Opens a new event file in `dir`, which is created if missing.
  // A resumed run opens another file: TensorBoard merges them by step.
  explicit TensorboardWriter(const std::string& dir);
  const std::string& path() const { return file_.path(); }

  // `wall_time_s` is seconds since 1970. The record reaches the system before this returns.
  void add_scalar(std::string_view tag, int64_t step, float value, double wall_time_s);
  void add_scalar(std::string_view tag, int64_t step, float value);  // records the current time too

  // Adds a histogram of these values, which are at least 0, at the current time. Its buckets have a width of 1/8, so
  // that a value is known to 1/8.
  void add_histogram(std::string_view tag, int64_t step, std::span<const double> values);

 private:
  void write_summary(std::string_view value, int64_t step, double wall_time_s);
  void write_record(std::string_view event);
  File file_;
};

// Returns the CRC-32C (Castagnoli, reflected polynomial 0x82f63b78).
uint32_t crc32c(std::string_view bytes);
uint32_t masked_crc32c(std::string_view bytes);

}  // namespace moebius
