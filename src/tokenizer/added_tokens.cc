#include "tokenizer/added_tokens.h"

#include <algorithm>
#include <set>

#include "core/error.h"
#include "io/unicode.h"
#include "io/unicode_later.h"

namespace moebius {
namespace {

size_t skip_space_back(std::string_view text, size_t end) {
  while (end > 0) {
    const size_t before = previous_char(text, end);
    size_t at = before;
    if (!is_white_space(next_char(text, &at))) break;
    end = before;
  }
  return end;
}

size_t skip_space(std::string_view text, size_t begin) {
  for (size_t at = begin; at < text.size(); begin = at)
    if (!is_white_space(next_char(text, &at))) break;
  return begin;
}

AddedToken read_added_token(const JsonField& field) {
  return {.id = static_cast<int32_t>(field.at("id").integer(0, (1 << 24) - 1)),
          .content = field.at("content").string(),
          .special = field.at("special").boolean(),
          .normalized = field.at("normalized").boolean(),
          .lstrip = field.at("lstrip").boolean(),
          .rstrip = field.at("rstrip").boolean(),
          .single_word = field.at("single_word").boolean()};
}

}  // namespace

std::vector<AddedToken> read_added_tokens(const JsonField& field) {
  std::vector<AddedToken> tokens;
  std::set<int32_t> ids;
  std::set<std::string> contents;
  for (const JsonField& item : field.items()) {
    tokens.push_back(read_added_token(item));
    if (tokens.back().content.empty()) item.at("content").fail("some text");
    if (!ids.insert(tokens.back().id).second) item.at("id").fail("a unique id for each added token");
    if (!contents.insert(tokens.back().content).second) item.at("content").fail("each added token once");
  }
  return tokens;
}

AddedTokenFinder::AddedTokenFinder()
    : word_char_(TextPattern::pcre(R"(\A[\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}])")) {}

void AddedTokenFinder::add(const AddedToken& token, std::string_view content) {
  if (content.empty()) return;
  int32_t node = 0;
  for (const char c : content) {
    const auto byte = static_cast<uint8_t>(c);
    int32_t next = child(node, byte);
    if (next < 0) {
      next = static_cast<int32_t>(nodes_.size());
      nodes_[node].children.emplace_back(byte, next);
      nodes_.emplace_back();
    }
    node = next;
  }
  if (nodes_[node].token >= 0) return;
  nodes_[node].token = static_cast<int32_t>(tokens_.size());
  tokens_.push_back(token);
  bool& is_start = is_start_[static_cast<uint8_t>(content[0])];
  if (!is_start) starts_ += content[0];
  is_start = true;
}

int32_t AddedTokenFinder::child(int32_t node, uint8_t byte) const {
  for (const auto& [own, next] : nodes_[node].children)
    if (own == byte) return next;
  return -1;
}

size_t AddedTokenFinder::next_start(std::string_view text, size_t from) const {
  if (starts_.size() == 1) return std::min(text.find(starts_[0], from), text.size());
  while (from < text.size() && !is_start_[static_cast<uint8_t>(text[from])]) ++from;
  return from;
}

std::pair<int32_t, size_t> AddedTokenFinder::longest_at(std::string_view text, size_t at) const {
  int32_t node = 0, token = -1;
  size_t bytes = 0;
  for (size_t i = at; i < text.size() && (node = child(node, static_cast<uint8_t>(text[i]))) >= 0; ++i) {
    if (nodes_[node].token < 0) continue;
    token = nodes_[node].token;
    bytes = i + 1 - at;
  }
  return {token, bytes};
}

const AddedToken* AddedTokenFinder::first_special(std::string_view text) const {
  for (size_t at = next_start(text, 0); at < text.size();) {
    const auto [token, bytes] = longest_at(text, at);
    if (token >= 0 && tokens_[token].special) return &tokens_[token];
    at = next_start(text, at + std::max<size_t>(bytes, 1));
  }
  return nullptr;
}

bool AddedTokenFinder::widen(const AddedToken& token, std::string_view text, size_t done, MatchScratch& scratch,
                             size_t* begin, size_t* end) const {
  size_t match_begin = 0, match_end = 0;
  const auto is_word = [&](size_t from) {
    std::string character;
    append_utf8(substitute(next_char(text, &from)), &character);
    return word_char_.find(character, 0, scratch, &match_begin, &match_end);
  };
  if (token.single_word && *begin > 0 && is_word(previous_char(text, *begin))) return false;
  if (token.single_word && *end < text.size() && is_word(*end)) return false;
  if (token.lstrip) *begin = std::max(skip_space_back(text, *begin), done);
  if (token.rstrip) *end = skip_space(text, *end);
  return true;
}

}  // namespace moebius
