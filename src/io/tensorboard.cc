#include "io/tensorboard.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <filesystem>
#include <map>

#include "core/error.h"

namespace moebius {
namespace {

constexpr auto kCrcTable = [] {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t c = i;
    for (int bit = 0; bit < 8; ++bit) c = (c >> 1) ^ (c & 1 ? 0x82f63b78u : 0);
    table[i] = c;
  }
  return table;
}();

// The protobuf wire format is a key of (field << 3 | type), then the value.
enum WireType : uint8_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

template <class T>
void put_raw(std::string* out, T value) {
  out->append(reinterpret_cast<const char*>(&value), sizeof value);
}

void put_varint(std::string* out, uint64_t value) {
  for (; value >= 0x80; value >>= 7) out->push_back(static_cast<char>(value | 0x80));
  out->push_back(static_cast<char>(value));
}

void put_key(std::string* out, int field, WireType type) { out->push_back(static_cast<char>(field << 3 | type)); }

void put_bytes(std::string* out, int field, std::string_view bytes) {
  put_key(out, field, kBytes);
  put_varint(out, bytes.size());
  out->append(bytes);
}

// Returns the bytes of Event {1: wall_time, 2: step}.
std::string event_at(double wall_time_s, int64_t step) {
  std::string event;
  put_key(&event, 1, kFixed64);
  put_raw(&event, wall_time_s);
  put_key(&event, 2, kVarint);
  put_varint(&event, static_cast<uint64_t>(step));
  return event;
}

void put_double(std::string* out, int field, double value) {
  put_key(out, field, kFixed64);
  put_raw(out, value);
}

// Returns the bytes of HistogramProto {1: min, 2: max, 3: num, 4: sum, 5: sum_squares, 6: bucket_limit, 7: bucket},
// where bucket_limit[i] is the end of bucket i and the begin of the next. A row of empty buckets is one bucket.
std::string histogram_proto(std::span<const double> values) {
  constexpr double kWidth = 0.125;
  std::map<int64_t, double> filled;
  double min = values.empty() ? 0 : values[0], max = min, sum = 0, squares = 0;
  for (const double value : values) {
    ++filled[static_cast<int64_t>(value / kWidth)];
    min = std::min(min, value);
    max = std::max(max, value);
    sum += value;
    squares += value * value;
  }
  std::string limits, counts, proto;
  int64_t end = 0;
  for (const auto& [bucket, count] : filled) {
    if (bucket > end || limits.empty()) {
      put_raw(&limits, static_cast<double>(bucket) * kWidth);
      put_raw(&counts, 0.0);
    }
    end = bucket + 1;
    put_raw(&limits, static_cast<double>(end) * kWidth);
    put_raw(&counts, count);
  }
  put_double(&proto, 1, min);
  put_double(&proto, 2, max);
  put_double(&proto, 3, static_cast<double>(values.size()));
  put_double(&proto, 4, sum);
  put_double(&proto, 5, squares);
  put_bytes(&proto, 6, limits);
  put_bytes(&proto, 7, counts);
  return proto;
}

double now_s() { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); }

std::string host_name() {
  std::array<char, 256> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 && name[0] != '\0' ? name.data() : "localhost";
}

// Creates events.out.tfevents.<sec>.<host>.<pid>.<n> with the first free n.
File create_event_file(const std::string& dir, double now) {
  std::filesystem::create_directories(dir);
  for (int n = 0;; ++n) {
    const std::string path = fmt::format("{}/events.out.tfevents.{:010}.{}.{}.{}", dir, static_cast<int64_t>(now),
                                         host_name(), ::getpid(), n);
    if (!std::filesystem::exists(path)) return File::create_unique(path);
  }
}

}  // namespace

uint32_t crc32c(std::string_view bytes) {
  uint32_t c = ~0u;
  for (const char byte : bytes) c = (c >> 8) ^ kCrcTable[(c ^ static_cast<uint8_t>(byte)) & 0xff];
  return ~c;
}

uint32_t masked_crc32c(std::string_view bytes) {
  const uint32_t c = crc32c(bytes);
  return ((c >> 15) | (c << 17)) + 0xa282ead8u;
}

TensorboardWriter::TensorboardWriter(const std::string& dir) : file_(create_event_file(dir, now_s())) {
  std::string event = event_at(now_s(), 0);
  put_bytes(&event, 3, "brain.Event:2");
  write_record(event);
}

void TensorboardWriter::write_record(std::string_view event) {
  std::string record;
  put_raw<uint64_t>(&record, event.size());
  put_raw(&record, masked_crc32c(record));
  record.append(event);
  put_raw(&record, masked_crc32c(event));
  file_.append(record.data(), record.size());
}

void TensorboardWriter::add_scalar(std::string_view tag, int64_t step, float value) {
  add_scalar(tag, step, value, now_s());
}

void TensorboardWriter::add_scalar(std::string_view tag, int64_t step, float value, double wall_time_s) {
  std::string scalar;  // Value {1: tag, 2: simple_value}
  put_bytes(&scalar, 1, tag);
  put_key(&scalar, 2, kFixed32);
  put_raw(&scalar, value);
  write_summary(scalar, step, wall_time_s);
}

void TensorboardWriter::add_histogram(std::string_view tag, int64_t step, std::span<const double> values) {
  std::string histogram;  // Value {1: tag, 5: HistogramProto}
  put_bytes(&histogram, 1, tag);
  put_bytes(&histogram, 5, histogram_proto(values));
  write_summary(histogram, step, now_s());
}

void TensorboardWriter::write_summary(std::string_view value, int64_t step, double wall_time_s) {
  std::string summary;  // Summary {1: Value}
  put_bytes(&summary, 1, value);
  std::string event = event_at(wall_time_s, step);
  put_bytes(&event, 5, summary);
  write_record(event);
}

}  // namespace moebius
