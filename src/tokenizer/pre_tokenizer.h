// The "pre_tokenizer" of a tokenizer.json: cuts text into the words that the model sees one by one.
// Read: ByteLevel Split Digits Punctuation Whitespace WhitespaceSplit Metaspace Sequence.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "io/json_field.h"
#include "tokenizer/text_pattern.h"

namespace moebius {

// Takes the words in order. A word may be gone after the call.
class WordSink {
 public:
  virtual ~WordSink() = default;
  virtual void word(std::string_view word) = 0;
};

// What becomes of the matches between which a text is cut.
enum class SplitBehavior { removed, isolated, merged_with_previous, merged_with_next, contiguous };

class PreTokenizer {
 public:
  PreTokenizer() = default;  // the text is one word
  // Error{input} naming the type when it is none of the above, and for a ByteLevel that is not the last.
  static PreTokenizer read(const JsonField& field);

  // Words are bytes to be read in the byte-level alphabet, each byte a symbol; otherwise characters are the symbols.
  bool is_byte_level() const { return is_byte_level_; }

  // `is_first`: the piece begins where the whole text does. Empty words are left out. REQUIRES: valid UTF-8.
  void split(std::string_view piece, bool is_first, MatchScratch& scratch, WordSink* sink) const;

 private:
  // One piece of text, on its way through the stages from `stage` on.
  struct Piece {
    std::string_view text;
    bool is_first = false;
    size_t stage = 0;
  };
  struct Run {
    MatchScratch& scratch;
    WordSink* sink;
  };
  using Stage = std::function<void(const PreTokenizer&, const Piece&, const Run&)>;

  void run(const Piece& piece, const Run& run) const;
  void add(const JsonField& field);
  void add_byte_level(const JsonField& field);
  void add_metaspace(const JsonField& field);
  template <class Cutter>
  void add_split(Cutter cutter, SplitBehavior behavior, bool invert);

  std::vector<Stage> stages_;
  bool is_byte_level_ = false;
};

}  // namespace moebius
