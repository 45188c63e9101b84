#include "tokenizer/normalizer.h"

#include <optional>

#include "core/error.h"
#include "io/unicode.h"

namespace moebius {
namespace {

constexpr char32_t kCapitalIWithDot = 0x130;  // the only character with a lower case of two: i and a dot above

void lowercase(std::string* text) {
  std::string lower;
  lower.reserve(text->size());
  for (size_t at = 0; at < text->size();) {
    const char32_t c = next_char(*text, &at);
    append_utf8(lower_case(c), &lower);
    if (c == kCapitalIWithDot) lower.append("\xCC\x87");
  }
  *text = std::move(lower);
}

void strip(std::string* text, bool left, bool right) {
  size_t begin = 0, end = text->size();
  for (size_t at = 0; left && at < end; begin = at)
    if (!is_white_space(next_char(*text, &at))) break;
  while (right && end > begin) {
    size_t at = previous_char(*text, end);
    const size_t before = at;
    if (!is_white_space(next_char(*text, &at))) break;
    end = before;
  }
  *text = text->substr(begin, end - begin);
}

void replace(std::string* text, const TextPattern& pattern, const std::string& content, MatchScratch& scratch) {
  std::string out;
  out.reserve(text->size());
  pattern.for_each_span(*text, scratch, [&](size_t begin, size_t end, bool is_match) {
    if (is_match) {
      out.append(content);
    } else {
      out.append(*text, begin, end - begin);
    }
  });
  *text = std::move(out);
}

std::optional<UnicodeForm> form_of(const std::string& type) {
  if (type == "NFC") return UnicodeForm::nfc;
  if (type == "NFD") return UnicodeForm::nfd;
  if (type == "NFKC") return UnicodeForm::nfkc;
  if (type == "NFKD") return UnicodeForm::nfkd;
  return std::nullopt;
}

}  // namespace

Normalizer Normalizer::read(const JsonField& field) {
  Normalizer normalizer;
  normalizer.add(field);
  return normalizer;
}

void Normalizer::add(const JsonField& field) {
  const std::string& type = field.at("type").string();
  if (const auto form = form_of(type)) {
    steps_.push_back([form](std::string* text, MatchScratch&) { *text = unicode_normalize(*text, *form); });
  } else if (type == "Lowercase") {
    steps_.push_back([](std::string* text, MatchScratch&) { lowercase(text); });
  } else if (type == "Strip") {
    const bool left = field.at("strip_left").boolean(), right = field.at("strip_right").boolean();
    steps_.push_back([=](std::string* text, MatchScratch&) { strip(text, left, right); });
  } else if (type == "Replace") {
    const TextPattern pattern = TextPattern::read(field.at("pattern"));
    steps_.push_back([pattern, content = field.at("content").string()](std::string* text, MatchScratch& scratch) {
      replace(text, pattern, content, scratch);
    });
  } else if (type == "Prepend") {
    steps_.push_back([prefix = field.at("prepend").string()](std::string* text, MatchScratch&) {
      if (!text->empty()) text->insert(0, prefix);
    });
  } else if (type == "Sequence") {
    for (const JsonField& item : field.at("normalizers").items()) add(item);
  } else {
    field.at("type").fail("NFC, NFD, NFKC, NFKD, Lowercase, Strip, Replace, Prepend or Sequence",
                          "this normalizer is not supported");
  }
}

void Normalizer::apply(std::string* text, MatchScratch& scratch) const {
  for (const Step& step : steps_) step(text, scratch);
}

}  // namespace moebius
