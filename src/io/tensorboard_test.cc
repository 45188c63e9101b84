#include "io/tensorboard.h"

#include <cstring>
#include <map>

#include "io/testing.h"

namespace moebius {
namespace {

template <class T>
T take(std::string_view* bytes) {
  T value;
  std::memcpy(&value, bytes->data(), sizeof value);
  bytes->remove_prefix(sizeof value);
  return value;
}

uint64_t take_varint(std::string_view* bytes) {
  uint64_t value = 0;
  for (int shift = 0;; shift += 7) {
    const auto byte = take<uint8_t>(bytes);
    value |= static_cast<uint64_t>(byte & 0x7f) << shift;
    if (byte < 0x80) return value;
  }
}

// Returns the raw bytes of each field; the value of a varint as 8 bytes.
std::map<int, std::string> parse_message(std::string_view bytes) {
  std::map<int, std::string> fields;
  while (!bytes.empty()) {
    const uint64_t key = take_varint(&bytes);
    uint64_t size = 0, varint = 0;
    switch (key & 7) {
      case 0:
        varint = take_varint(&bytes);
        break;
      case 1:
        size = 8;
        break;
      case 2:
        size = take_varint(&bytes);
        break;
      case 5:
        size = 4;
        break;
      default:
        ADD_FAILURE() << "wire type " << (key & 7);
        return fields;
    }
    std::string& value = fields[static_cast<int>(key >> 3)];
    value =
        (key & 7) == 0 ? std::string(reinterpret_cast<const char*>(&varint), 8) : std::string(bytes.substr(0, size));
    bytes.remove_prefix(size);
  }
  return fields;
}

std::vector<std::map<int, std::string>> parse_events(const std::string& path) {
  const std::string contents = read_file(path);
  std::string_view bytes = contents;
  std::vector<std::map<int, std::string>> events;
  while (!bytes.empty()) {
    const std::string_view length_bytes = bytes.substr(0, 8);
    const auto length = take<uint64_t>(&bytes);
    EXPECT_EQ(take<uint32_t>(&bytes), masked_crc32c(length_bytes));
    const std::string_view event = bytes.substr(0, length);
    bytes.remove_prefix(length);
    EXPECT_EQ(take<uint32_t>(&bytes), masked_crc32c(event));
    events.push_back(parse_message(event));
  }
  return events;
}

template <class T>
T as(std::string_view bytes) {
  return take<T>(&bytes);
}

TEST(Tensorboard, Crc32cGivesThePublishedValues) {
  EXPECT_EQ(crc32c("123456789"), 0xe3069283u);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aau);  // RFC 3720, B.4
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43u);
}

TEST(Tensorboard, RecordsParseAgain) {
  const TestDir dir;
  TensorboardWriter writer(dir.path("tb/deep"));
  writer.add_scalar("train/loss", 300, 2.5f, 1e9 + 0.25);
  writer.add_scalar("a tag of more than a hundred and twenty seven bytes: " + std::string(100, 'x'), int64_t{1} << 40,
                    -1.0f);
  EXPECT_NE(writer.path().find("events.out.tfevents."), std::string::npos);
  const auto events = parse_events(writer.path());
  ASSERT_EQ(events.size(), 3u);
  EXPECT_EQ(events[0].at(3), "brain.Event:2");
  EXPECT_EQ(as<double>(events[1].at(1)), 1e9 + 0.25);
  EXPECT_EQ(as<int64_t>(events[1].at(2)), 300);
  const auto value = parse_message(parse_message(events[1].at(5)).at(1));
  EXPECT_EQ(value.at(1), "train/loss");
  EXPECT_EQ(as<float>(value.at(2)), 2.5f);
  EXPECT_EQ(as<int64_t>(events[2].at(2)), int64_t{1} << 40);
  EXPECT_GT(as<double>(events[2].at(1)), 1.6e9);
}

std::vector<double> doubles_of(std::string_view bytes) {
  std::vector<double> values;
  while (!bytes.empty()) values.push_back(take<double>(&bytes));
  return values;
}

TEST(Tensorboard, AHistogramHasItsValuesInBuckets) {
  const TestDir dir;
  TensorboardWriter writer(dir.path());
  const std::vector<double> values{0, 0.0625, 1, 1.1, 3};
  writer.add_histogram("moe_layer_1/expert_load_over_mean", 7, values);
  const auto events = parse_events(writer.path());
  ASSERT_EQ(events.size(), 2u);
  EXPECT_EQ(as<int64_t>(events[1].at(2)), 7);
  const auto value = parse_message(parse_message(events[1].at(5)).at(1));
  EXPECT_EQ(value.at(1), "moe_layer_1/expert_load_over_mean");
  const auto histogram = parse_message(value.at(5));
  EXPECT_EQ(as<double>(histogram.at(1)), 0);
  EXPECT_EQ(as<double>(histogram.at(2)), 3);
  EXPECT_EQ(as<double>(histogram.at(3)), 5);
  EXPECT_NEAR(as<double>(histogram.at(4)), 5.1625, 1e-12);
  EXPECT_NEAR(as<double>(histogram.at(5)), 0.0625 * 0.0625 + 1 + 1.21 + 9, 1e-12);
  EXPECT_THAT(doubles_of(histogram.at(6)), testing::ElementsAre(0, 0.125, 1, 1.125, 3, 3.125));
  EXPECT_THAT(doubles_of(histogram.at(7)), testing::ElementsAre(0, 2, 0, 2, 0, 1));
}

TEST(Tensorboard, TwoWritersInOneFolderHaveTwoFiles) {
  const TestDir dir;
  const TensorboardWriter a(dir.path()), b(dir.path());
  EXPECT_NE(a.path(), b.path());
  EXPECT_EQ(dir.num_files(), 2);
}

}  // namespace
}  // namespace moebius
