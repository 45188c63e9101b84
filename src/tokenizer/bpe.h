// Byte-pair encoding, the "model" of a tokenizer.json: a word starts as its characters (or bytes), and the pair of
// neighbours that comes first in the list of merges, the leftmost of equals, becomes one symbol until no pair is
// listed. The rules, down to those for unknown characters, are those of Hugging Face's tokenizers.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "io/json_field.h"
#include "tokenizer/pair_table.h"
#include "tokenizer/word_cache.h"

namespace moebius {

// What encoding one word after the other needs; one for each thread.
class BpeScratch {
 private:
  friend class Bpe;
  struct Symbol {
    int32_t id, previous, next;  // neighbours by index, -1 at the ends; an id of -1 is a symbol that was merged away
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
  // `byte_level`: words are bytes, written in the vocabulary in the byte-level alphabet (tokenizer/byte_level.h).
  // Error{input} for another model type, dropout, subword prefixes and suffixes, ids that are used twice, merges of or
  // into tokens that the vocabulary lacks.
  static Bpe read(const JsonField& model, bool byte_level);

  // By id, as tokenizer.json spells them; empty where no token has the id.
  const std::vector<std::string>& tokens() const { return tokens_; }
  int32_t find(const std::string& token) const;  // its id, -1 when there is none

  // Appends the ids of a word. O(n log n) in its length.
  void encode(std::string_view word, BpeScratch* scratch, std::vector<int32_t>* ids) const;

 private:
  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view text) const { return std::hash<std::string_view>{}(text); }
  };
  using Ids = std::unordered_map<std::string, int32_t, Hash, std::equal_to<>>;
  // What a character starts as: its token, or the tokens of its UTF-8 bytes, or unknown when there are none.
  struct Atom {
    int32_t id = -1;
    std::vector<int32_t> byte_ids;
  };

  void read_vocab(const JsonField& vocab);
  void read_merges(const JsonField& merges);
  void find_unknown(const JsonField& model);
  void find_atoms_of_bytes();
  void find_marker();
  Atom atom_of(std::string_view character) const;

  void encode_piece(std::string_view word, BpeScratch* scratch, std::vector<int32_t>* ids) const;
  void start_symbols(std::string_view word, BpeScratch* scratch) const;
  void push_candidate(BpeScratch* scratch, int32_t position) const;
  void merge(BpeScratch* scratch) const;

  bool byte_level_ = false, byte_fallback_ = false, fuse_unknown_ = false, ignore_merges_ = false;
  bool parts_at_marker_ = false;
  int32_t unknown_id_ = -1;
  std::vector<std::string> tokens_;
  Ids ids_;    // token to id
  Ids words_;  // with byte_level the bytes of a token to its id; otherwise empty
  PairTable merges_;
  std::array<Atom, 256> atoms_of_bytes_;
};

}  // namespace moebius
