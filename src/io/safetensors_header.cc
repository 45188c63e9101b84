// The header's parser:
// one pass over events without a tree, so that duplicate keys are seen and depth costs nothing.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <tuple>
#include <unordered_set>

#include "core/error.h"
#include "io/safetensors.h"

namespace moebius {
namespace {

using Json = nlohmann::json;

constexpr size_t kMaxRank = 32;
constexpr std::string_view kMetadata = "__metadata__";

struct RawEntry {
  std::string name;
  std::optional<std::string> dtype;
  std::optional<std::vector<uint64_t>> shape, data_offsets;
};

class HeaderSax : public Json::json_sax_t {
 public:
  explicit HeaderSax(const std::string& who) : who_(who) {}
  std::vector<RawEntry> entries;
  SafetensorsMetadata metadata;

  bool null() override { refuse("a null"); }
  bool boolean(bool) override { refuse("a boolean"); }
  bool binary(binary_t&) override { refuse("binary data"); }
  bool number_integer(number_integer_t value) override { refuse(fmt::format("the negative number {}", value)); }
  bool number_float(number_float_t, const string_t& text) override { refuse(fmt::format("the number {}", text)); }

  bool number_unsigned(number_unsigned_t value) override {
    if (place_ != Place::numbers) refuse(fmt::format("the number {}", value));
    if (value > INT64_MAX) refuse(fmt::format("the number {}, too large,", value));
    if (numbers_->size() == kMaxRank) refuse(fmt::format("more than {} numbers in an array", kMaxRank));
    numbers_->push_back(value);
    return true;
  }

  bool string(string_t& value) override {
    if (place_ == Place::metadata) {
      metadata[key_] = value;
    } else if (place_ == Place::entry && key_ == "dtype") {
      entries.back().dtype = value;
    } else {
      refuse("a string");
    }
    return true;
  }

  bool key(string_t& value) override {
    key_ = value;
    if (place_ == Place::top) return top_key();
    if (place_ == Place::metadata) {
      if (metadata.contains(key_)) refuse(fmt::format("a repeated __metadata__ key \"{}\"", key_));
    } else {
      entry_key();
    }
    return true;
  }

  bool start_object(size_t) override {
    if (place_ == Place::outside) {
      place_ = Place::top;
    } else if (place_ == Place::top) {
      place_ = key_ == kMetadata ? Place::metadata : Place::entry;
      if (place_ == Place::entry) entries.push_back({.name = key_});
    } else {
      refuse("an object inside");
    }
    return true;
  }

  bool end_object() override {
    if (place_ == Place::entry) {
      const RawEntry& e = entries.back();
      if (!e.dtype || !e.shape || !e.data_offsets) refuse("an entry without dtype, shape or data_offsets");
    }
    place_ = place_ == Place::top ? Place::outside : Place::top;
    return true;
  }

  bool start_array(size_t) override {
    if (place_ != Place::entry || key_ == "dtype") refuse("an array");
    numbers_ = &(key_ == "shape" ? entries.back().shape : entries.back().data_offsets).emplace();
    place_ = Place::numbers;
    return true;
  }

  bool end_array() override {
    place_ = Place::entry;
    return true;
  }

  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception&) override {
    MOEBIUS_FAIL(input, "safetensors {}: expected a JSON header in UTF-8; got an error at byte {} of it; {}", who_,
                 position, "the file is damaged or is not a safetensors file, fetch it again");
  }

 private:
  enum class Place { outside, top, metadata, entry, numbers };

  [[noreturn]] void refuse(const std::string& got) const {
    MOEBIUS_FAIL(input, "safetensors {}: expected name -> {{dtype, shape, data_offsets}}; got {} at \"{}\"; {}", who_,
                 got, key_, "the header is damaged, fetch or write the file again");
  }

  bool top_key() {
    if (!names_.insert(key_).second) refuse("a repeated name");
    if (key_.find('\0') != std::string::npos) refuse("a name with a NUL");
    if (key_.find("..") != std::string::npos) refuse("a name with \"..\"");
    return true;
  }

  void entry_key() const {
    const RawEntry& e = entries.back();
    if (key_ == "dtype") return expect_first(!e.dtype);
    if (key_ == "shape") return expect_first(!e.shape);
    if (key_ == "data_offsets") return expect_first(!e.data_offsets);
    refuse(fmt::format("an unknown field in \"{}\"", e.name));
  }

  void expect_first(bool is_first) const {
    if (!is_first) refuse(fmt::format("a repeated field in \"{}\"", entries.back().name));
  }

  const std::string& who_;
  Place place_ = Place::outside;
  std::string key_;
  std::vector<uint64_t>* numbers_ = nullptr;
  std::unordered_set<std::string> names_;
};

// Returns the product of the shape and the element size. A dimension of zero does not
// hide an overflow.
int64_t checked_bytes(const RawEntry& raw, DType dtype, const std::string& who) {
  int64_t bytes = size_of(dtype);
  bool overflow = false, empty = false;
  for (const uint64_t dim : *raw.shape) {
    empty |= dim == 0;
    overflow |= __builtin_mul_overflow(bytes, std::max<uint64_t>(dim, 1), &bytes);
  }
  MOEBIUS_CHECK(
      input, !overflow,
      "safetensors {}: expected \"{}\" to have less than 2^63 bytes; got shape [{}]; the header is damaged, fetch or "
      "write the file again",
      who, raw.name, fmt::join(*raw.shape, ", "));
  return empty ? 0 : bytes;
}

SafetensorsEntry checked_entry(const RawEntry& raw, const std::string& who) {
  const DType dtype = dtype_of_safetensors(*raw.dtype, fmt::format("{}: \"{}\"", who, raw.name));
  const int64_t bytes = checked_bytes(raw, dtype, who);
  const auto& offsets = *raw.data_offsets;
  MOEBIUS_CHECK(
      input, offsets.size() == 2 && offsets[0] <= offsets[1],
      "safetensors {}: expected data_offsets [begin, end] for \"{}\"; got [{}]; the header is damaged, fetch or write "
      "the file again",
      who, raw.name, fmt::join(offsets, ", "));
  const int64_t span = static_cast<int64_t>(offsets[1] - offsets[0]);
  MOEBIUS_CHECK(
      input, span == bytes,
      "safetensors {}: expected {} bytes for \"{}\", {} [{}]; got data_offsets over {} bytes; the header is damaged, "
      "fetch or write the file again",
      who, bytes, raw.name, *raw.dtype, fmt::join(*raw.shape, ", "), span);
  return {.name = raw.name,
          .dtype = dtype,
          .shape = {raw.shape->begin(), raw.shape->end()},
          .offset = static_cast<int64_t>(offsets[0]),
          .bytes = bytes};
}

void check_layout(const std::vector<SafetensorsEntry>& by_offset, int64_t data_bytes, const std::string& who) {
  int64_t end = 0;
  for (const SafetensorsEntry& e : by_offset) {
    MOEBIUS_CHECK(
        input, e.offset == end,
        "safetensors {}: expected \"{}\" to begin at {}, where the tensor before it ends; got {}, {}; the header is "
        "damaged, fetch or write the file again",
        who, e.name, end, e.offset, e.offset < end ? "an overlap" : "a hole");
    end = e.offset + e.bytes;  // cannot overflow: both are below 2^63, and their sum was an offset
  }
  MOEBIUS_CHECK(input, end == data_bytes,
                "safetensors {}: expected {} bytes of data as the header says; got {}; the file is {}, fetch it again",
                who, end, data_bytes, data_bytes < end ? "truncated" : "followed by other bytes");
}

}  // namespace

SafetensorsHeader parse_safetensors_header(std::string_view json, int64_t data_bytes, const std::string& who) {
  MOEBIUS_CHECK(
      input, !json.empty() && json[0] == '{',
      "safetensors {}: expected a header that starts with '{{'; got something else; it is not a safetensors file", who);
  HeaderSax sax(who);
  Json::sax_parse(json.begin(), json.end(), &sax);
  SafetensorsHeader header{.metadata = std::move(sax.metadata)};
  header.entries.reserve(sax.entries.size());
  for (const RawEntry& raw : sax.entries) header.entries.push_back(checked_entry(raw, who));
  // An empty tensor has the offset of its successor and comes before it.
  std::sort(header.entries.begin(), header.entries.end(), [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
    return std::tie(a.offset, a.bytes, a.name) < std::tie(b.offset, b.bytes, b.name);
  });
  check_layout(header.entries, data_bytes, who);
  return header;
}

}  // namespace moebius
