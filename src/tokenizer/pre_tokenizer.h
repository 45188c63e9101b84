// The "pre_tokenizer" of a tokenizer.json, which splits text into the words that the model encodes
// one by one.
// Supported: ByteLevel Split Digits Punctuation Whitespace WhitespaceSplit Metaspace Sequence.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "io/json_field.h"
#include "tokenizer/text_pattern.h"

namespace moebius {

// Receives the words in order. The characters of a word are valid during the call only.
class WordSink {
 public:
  virtual ~WordSink() = default;
  virtual void word(std::string_view word) = 0;
};

// How a text is split at the matches of a pattern.
enum class SplitBehavior { removed, isolated, merged_with_previous, merged_with_next, contiguous };

class PreTokenizer {
 public:
  PreTokenizer() = default;  // the text is one word
  // Throws Error{input} that names the type when it is none of the above, and for a ByteLevel that
  // is not the last.
  static PreTokenizer read(const JsonField& field);

  // Returns whether each byte of a word is a symbol, to be looked up in the byte-level alphabet.
  // Otherwise the characters are the symbols.
  bool is_byte_level() const { return is_byte_level_; }

  // Splits `piece` and leaves out empty words. `is_first` says that the piece begins where the
  // whole text begins.
  // REQUIRES: valid UTF-8.
  void split(std::string_view piece, bool is_first, MatchScratch& scratch, WordSink* sink) const;

 private:
  // A piece of text that has yet to pass `stage` and all later stages.
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
  // Adds a stage that cuts at the spans of `cutter`. invert: its matches count as the text between matches, and the
  // text between them as matches.
  template <class Cutter>
  void add_split(Cutter cutter, SplitBehavior behavior, bool invert = false);

  std::vector<Stage> stages_;
  bool is_byte_level_ = false;
};

}  // namespace moebius
