#include "io/json_field.h"

#include "core/error.h"
#include "io/unicode.h"

namespace moebius {
namespace {

constexpr size_t kShownBytes = 60;

// Returns the value as text, short enough for a message and never cut inside a character.
std::string shown(const nlohmann::json& value) {
  std::string text = value.dump(-1, ' ', true);
  if (text.size() <= kShownBytes) return text;
  return text.substr(0, kShownBytes) + "...";
}

}  // namespace

bool JsonField::has(const char* key) const {
  if (!value_->is_object()) fail("an object");
  const auto found = value_->find(key);
  return found != value_->end() && !found->is_null();
}

JsonField JsonField::at(const std::string& key) const {
  if (!value_->is_object()) fail("an object");
  const auto found = value_->find(key);
  MOEBIUS_CHECK(input, found != value_->end(), "{}: expected the key \"{}\"; got none; correct the file", path_, key);
  const char* join = path_.ends_with(".json") ? ": " : ".";
  return JsonField(*found, path_ + join + key);
}

std::vector<JsonField> JsonField::items() const {
  if (!value_->is_array()) fail("a list");
  std::vector<JsonField> items;
  items.reserve(value_->size());
  for (size_t i = 0; i < value_->size(); ++i) items.emplace_back((*value_)[i], fmt::format("{}[{}]", path_, i));
  return items;
}

const std::string& JsonField::string() const {
  if (!value_->is_string()) fail("a string");
  return value_->get_ref<const std::string&>();
}

char32_t JsonField::character() const {
  const std::string& text = string();
  size_t at = 0;
  const char32_t character = text.empty() ? 0 : next_char(text, &at);
  if (text.empty() || at != text.size()) fail("a string of one character");
  return character;
}

bool JsonField::boolean() const {
  if (!value_->is_boolean()) fail("true or false");
  return value_->get<bool>();
}

int64_t JsonField::integer(int64_t min, int64_t max) const {
  const bool fits =
      value_->is_number_integer() && (!value_->is_number_unsigned() || value_->get<uint64_t>() <= INT64_MAX);
  if (!fits || value_->get<int64_t>() < min || value_->get<int64_t>() > max)
    fail(fmt::format("an integer in [{}, {}]", min, max));
  return value_->get<int64_t>();
}

void JsonField::fail(std::string_view expected, std::string_view action) const {
  MOEBIUS_FAIL(input, "{}: expected {}; got {}; {}", path_, expected, shown(*value_), action);
}

}  // namespace moebius
