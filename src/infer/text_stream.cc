#include "infer/text_stream.h"

#include <algorithm>

#include "core/error.h"

namespace moebius {
namespace {

// Returns the length of the longest suffix of `text` that is a prefix of a stop string.
size_t length_of_begun(const std::string& text, const std::vector<std::string>& stops) {
  size_t longest = 0;
  for (const std::string& stop : stops) {
    for (size_t n = std::min(stop.size() - 1, text.size()); n > longest; --n)
      if (text.ends_with(std::string_view(stop).substr(0, n))) longest = n;
  }
  return longest;
}

}  // namespace

TextStream::TextStream(const Tokenizer& tokenizer, std::vector<std::string> stops)
    : tokenizer_(tokenizer), stops_(std::move(stops)) {
  for (const std::string& stop : stops_)
    MOEBIUS_CHECK(usage, !stop.empty(), "generate: expected stop strings of at least one character; got an empty one");
}

// A token's text may depend on the token before it, and a character may be spread over several tokens.
std::string TextStream::add(int32_t id) {
  ids_.push_back(id);
  const std::span<const int32_t> recent = std::span(ids_).subspan(first_);
  const std::string before = tokenizer_.decode(recent.first(read_ - first_)), now = tokenizer_.decode(recent);
  if (now.size() <= before.size() || now.ends_with("\xEF\xBF\xBD")) return "";
  first_ = read_;
  read_ = ids_.size();
  hold_back(now.substr(before.size()));
  return emit(is_stopped_ ? held_.size() : held_.size() - length_of_begun(held_, stops_));
}

std::string TextStream::rest() {
  if (!is_stopped_) {
    const std::span<const int32_t> recent = std::span(ids_).subspan(first_);
    const std::string before = tokenizer_.decode(recent.first(read_ - first_)), now = tokenizer_.decode(recent);
    if (now.size() > before.size()) hold_back(now.substr(before.size()));
    first_ = read_ = ids_.size();
  }
  return emit(held_.size());
}

void TextStream::hold_back(const std::string& piece) {
  held_ += piece;
  size_t end = std::string::npos;
  for (const std::string& stop : stops_) end = std::min(end, held_.find(stop));
  if (end == std::string::npos) return;
  held_.resize(end);
  is_stopped_ = true;
}

std::string TextStream::emit(size_t count) {
  const std::string piece = held_.substr(0, count);
  held_.erase(0, count);
  text_ += piece;
  return piece;
}

}  // namespace moebius
