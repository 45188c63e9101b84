// The "added_tokens" of a tokenizer.json are strings that are found in the text before any other
// rule applies.
// The leftmost match counts, and the longest where several begin at one place.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "io/json_field.h"
#include "tokenizer/text_pattern.h"

namespace moebius {

struct AddedToken {
  int32_t id = 0;
  std::string content;
  bool special = false;
  bool normalized = false;              // found in the normalized text; other tokens are found in the raw text
  bool lstrip = false, rstrip = false;  // includes the white space on its left, on its right
  bool single_word = false;             // found only where no word character is next to it
};

// Reads the list. Throws Error{input} for anything that is not a list of such tokens
// with unique ids.
std::vector<AddedToken> read_added_tokens(const JsonField& field);

// Finds tokens in O(bytes of the text * bytes of the longest token).
class AddedTokenFinder {
 public:
  AddedTokenFinder();
  // `content` is the string to find, which a normalizer may have changed. Of two equal strings the
  // first counts.
  void add(const AddedToken& token, std::string_view content);
  bool empty() const { return tokens_.empty(); }

  // Returns the first special token that is spelled out in `text`, or null if there is none.
  const AddedToken* first_special(std::string_view text) const;

  // Calls fn(piece, token) in order for each token and for each piece of text between tokens (token
  // null). Special tokens are left in the text unless `find_special`.
  template <class Fn>
  void split(std::string_view text, bool find_special, MatchScratch& scratch, Fn&& fn) const {
    size_t done = 0;
    for (size_t at = 0; at < text.size();) {
      const auto [token, bytes] = longest_at(text, at);
      size_t begin = at, end = at + bytes;
      at = token < 0 ? next_start(text, at + 1) : end;
      if (token < 0 || (tokens_[token].special && !find_special)) continue;
      if (!widen(tokens_[token], text, done, scratch, &begin, &end)) continue;
      if (done < begin) fn(text.substr(done, begin - done), nullptr);
      fn(text.substr(begin, end - begin), &tokens_[token]);
      done = end;
    }
    if (done < text.size()) fn(text.substr(done), nullptr);
  }

 private:
  struct Node {
    int32_t token = -1;  // the token that ends at this node, -1 if none does
    std::vector<std::pair<uint8_t, int32_t>> children;
  };

  int32_t child(int32_t node, uint8_t byte) const;
  size_t next_start(std::string_view text, size_t from) const;
  std::pair<int32_t, size_t> longest_at(std::string_view text, size_t at) const;
  // Applies lstrip, rstrip and single_word. Returns false when the token does not count here.
  bool widen(const AddedToken& token, std::string_view text, size_t done, MatchScratch& scratch, size_t* begin,
             size_t* end) const;

  std::vector<AddedToken> tokens_;
  std::vector<Node> nodes_ = std::vector<Node>(1);
  std::string starts_;  // the first bytes of all tokens, each once
  std::array<bool, 256> is_start_{};
  TextPattern word_char_;
};

}  // namespace moebius
