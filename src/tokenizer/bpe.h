// Byte-pair encoding, the "model" of a tokenizer.json.
// A word starts as its characters (or bytes).
// Then the pair of neighbours that is earliest in the list of merges becomes one symbol; of equal pairs, the leftmost.
// This is repeated until no pair is in the list.
// All rules are those of Hugging Face's tokenizers, including those for unknown characters.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "io/json_field.h"
#include "tokenizer/pair_table.h"
#include "tokenizer/word_cache.h"

namespace moebius {

// Scratch memory for encoding words one after the other. Each thread needs its own.
class BpeScratch {
 private:
  friend class Bpe;
  struct Symbol {
    int32_t id, previous, next;  // neighbours are indices, -1 at the ends; a symbol with id -1 was merged away
  };
  struct Candidate {
    uint64_t order;  // rank, then position
    int32_t merged_id;
  };
  std::vector<Symbol> symbols_;
  std::vector<Candidate> heap_;
  std::vector<int32_t> ids_;
  WordCache cache_;
};

class Bpe {
 public:
  // With `byte_level`, words are bytes. The vocabulary writes them in the byte-level alphabet
  // (tokenizer/byte_level.h).
  // Throws Error{input} for another model type, dropout, subword prefixes and suffixes, ids that
  // are used twice, and merges of or into tokens that the vocabulary lacks.
  static Bpe read(const JsonField& model, bool byte_level);

  // Returns the tokens by id, as tokenizer.json spells them. An entry is empty where no token
  // has the id.
  const std::vector<std::string>& tokens() const { return tokens_; }
  int32_t find(const std::string& token) const;  // returns the id of `token`, or -1 if there is none

  // Returns whether encode leaves out a byte of a word, and whether it does so with any byte of UTF-8. Without
  // byte_level the answer is no.
  bool loses(uint8_t byte) const {
    return byte_level_ && unknown_id_ < 0 && atoms_of_bytes_[byte].id < 0 && atoms_of_bytes_[byte].byte_ids.empty();
  }
  bool loses_bytes() const;

  // Appends the ids of a word, in O(n log n) of its length.
  void encode(std::string_view word, BpeScratch* scratch, std::vector<int32_t>* ids) const;

 private:
  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view text) const { return std::hash<std::string_view>{}(text); }
  };
  using Ids = std::unordered_map<std::string, int32_t, Hash, std::equal_to<>>;
  // The symbols that a character starts as: its token, or else the tokens of its UTF-8 bytes.
  // A character that has neither is unknown.
  struct Atom {
    int32_t id = -1;
    std::vector<int32_t> byte_ids;
  };

  void read_vocab(const JsonField& vocab);
  void read_merges(const JsonField& merges);
  void find_unknown(const JsonField& model);
  void find_atoms_of_bytes();
  Atom atom_of(std::string_view character) const;

  void encode_piece(std::string_view word, BpeScratch* scratch, std::vector<int32_t>* ids) const;
  void start_symbols(std::string_view word, BpeScratch* scratch) const;
  void push_candidate(BpeScratch* scratch, int32_t position) const;
  void merge(BpeScratch* scratch) const;

  bool byte_level_ = false, byte_fallback_ = false, fuse_unknown_ = false, ignore_merges_ = false;
  bool parts_at_marker_ = false;
  int32_t unknown_id_ = -1;
  std::vector<std::string> tokens_;
  Ids ids_;    // the id of each token
  Ids words_;  // the id of each token's bytes with byte_level, otherwise empty
  PairTable merges_;
  std::array<Atom, 256> atoms_of_bytes_;
};

}  // namespace moebius
