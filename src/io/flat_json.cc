#include "io/flat_json.h"

#include <charconv>
#include <string>

#include "io/unicode.h"
#include "io/utf8.h"

namespace moebius {
namespace {

using nlohmann::json;

// Each function returns false where the text is not what it reads. The reader must not be
// used after that.
class FlatReader {
 public:
  explicit FlatReader(std::string_view text) : at_(text.data()), end_(text.data() + text.size()) {}

  bool object(json* object) {
    *object = json::object();
    if (!take('{')) return false;
    if (take('}')) return at_end();
    do {
      std::string key;
      json value;
      if (!string(&key) || !take(':') || !read_value(&value)) return false;
      if (!object->emplace(std::move(key), std::move(value)).second) return false;
    } while (take(','));
    return take('}') && at_end();
  }

 private:
  void skip_space() {
    while (at_ < end_ && (*at_ == ' ' || *at_ == '\t' || *at_ == '\n' || *at_ == '\r')) ++at_;
  }
  bool at_end() {
    skip_space();
    return at_ == end_;
  }
  bool take(char c) {
    skip_space();
    if (at_ == end_ || *at_ != c) return false;
    ++at_;
    return true;
  }
  bool take_word(std::string_view word) {
    if (!std::string_view(at_, end_).starts_with(word)) return false;
    at_ += word.size();
    return true;
  }

  bool read_value(json* value) {
    skip_space();
    if (at_ == end_) return false;
    switch (*at_) {
      case '"':
        *value = std::string();
        return string(value->get_ptr<std::string*>());
      case 't':
        *value = true;
        return take_word("true");
      case 'f':
        *value = false;
        return take_word("false");
      case 'n':
        return take_word("null");
      default:
        return integer(value);
    }
  }

  bool integer(json* value) {
    int64_t number = 0;
    const auto [stop, error] = std::from_chars(at_, end_, number);
    const char* digits = at_ + (*at_ == '-');
    const bool is_plain = error == std::errc() && stop - digits <= 18 && (*digits != '0' || stop == at_ + 1);
    if (!is_plain || (stop < end_ && (*stop == '.' || *stop == 'e' || *stop == 'E'))) return false;
    at_ = stop;
    if (number < 0) {
      *value = number;
    } else {
      *value = static_cast<uint64_t>(number);
    }
    return true;
  }

  bool string(std::string* text) {
    if (!take('"')) return false;
    for (;;) {
      const char* plain = at_;
      while (at_ < end_ && *at_ != '"' && *at_ != '\\' && static_cast<uint8_t>(*at_) >= 0x20) ++at_;
      text->append(plain, at_);
      if (at_ == end_) return false;
      const char stop = *at_++;
      if (stop == '"') return true;
      if (stop != '\\' || !escape(text)) return false;
    }
  }

  bool escape(std::string* text) {
    static constexpr std::string_view kNames = "\"\\/bfnrt", kMeanings = "\"\\/\b\f\n\r\t";
    if (at_ == end_) return false;
    const char name = *at_++;
    if (name == 'u') return unicode_escape(text);
    const size_t which = kNames.find(name);
    if (which == std::string_view::npos) return false;
    text->push_back(kMeanings[which]);
    return true;
  }

  bool unicode_escape(std::string* text) {
    uint32_t unit = 0, low = 0;
    if (!hex(&unit) || (unit >= 0xdc00 && unit < 0xe000)) return false;
    if (unit >= 0xd800 && unit < 0xdc00) {
      if (!take_word("\\u") || !hex(&low) || low < 0xdc00 || low >= 0xe000) return false;
      unit = 0x10000 + ((unit - 0xd800) << 10) + (low - 0xdc00);
    }
    append_utf8(unit, text);
    return true;
  }

  bool hex(uint32_t* unit) {
    if (end_ - at_ < 4) return false;
    const char* stop = std::from_chars(at_, at_ + 4, *unit, 16).ptr;
    const bool whole = stop == at_ + 4;
    at_ = stop;
    return whole;
  }

  const char *at_, *end_;
};

}  // namespace

std::optional<json> parse_flat_object(std::string_view text) {
  json object;
  if (find_invalid_utf8(text) >= 0 || !FlatReader(text).object(&object)) return std::nullopt;
  return object;
}

}  // namespace moebius
