// Megatron's indexed datasets. PREFIX.bin holds the tokens of all documents, concatenated.
// PREFIX.idx says where sequences and documents begin:
//
//   .idx  9 B "MMIDIDX\0\0" | u64 version = 1 | u8 dtype code | u64 n_seq | u64 n_doc
//         int32[n_seq] lengths in tokens | int64[n_seq] byte pointers |
//         int64[n_doc] first sequence of each document, then n_seq
//
// All values are little-endian, and none is aligned.
// A dataset is read as ONE stream of tokens, its sequences in order.
// The reader keeps only the first token of each document in memory, and reads the .bin by offset.
//
// PREFIX.targets (data/target_spans.h) says which tokens are targets of the loss. Without it
// all tokens are.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "data/target_spans.h"
#include "io/files.h"
#include "io/hash.h"

namespace moebius {

// The values are the dtype codes of the file.
enum class TokenType : uint8_t { u8 = 1, i8 = 2, i16 = 3, i32 = 4, i64 = 5, u16 = 8 };
int64_t size_of(TokenType type);
TokenType token_type_for_vocab(int64_t vocab_size);  // u16 below 65500, else i32, as in Megatron

struct TokenIndex {
  TokenType type = TokenType::i32;
  int64_t num_sequences = 0;
  // The token at which each document begins, then the number of tokens. The size is documents + 1,
  // and the values are non-decreasing.
  std::vector<int64_t> document_begins;
};

// Parses the index of a .bin of `bin_bytes` bytes. Throws Error{input} that names `who` unless all
// of this holds:
// - The dtype is known.
// - The sequences tile the .bin from its first byte to its last.
// - The documents tile the sequences.
// - There is at least one document and one token.
TokenIndex parse_token_index(std::string_view idx, int64_t bin_bytes, const std::string& who);

// Throws Error{input} "WHO: ..." if `name` is PREFIX.bin or PREFIX.idx of a dataset, where PREFIX
// is expected.
void refuse_file_for_prefix(const std::string& name, const std::string& who);

bool has_target_spans(const std::string& prefix);  // whether there is a PREFIX.targets

class TokenDataset {
 public:
  static TokenDataset open(const std::string& prefix);

  const std::string& prefix() const { return prefix_; }
  TokenType type() const { return index_.type; }
  int64_t num_sequences() const { return index_.num_sequences; }
  int64_t num_documents() const { return static_cast<int64_t>(index_.document_begins.size()) - 1; }
  int64_t num_tokens() const { return index_.document_begins.back(); }
  std::span<const int64_t> document_begins() const { return index_.document_begins; }
  bool has_targets() const { return has_targets_; }                     // whether some tokens are not targets
  std::span<const TokenSpan> target_spans() const { return targets_; }  // read if has_targets()

  // Reads tokens [begin, begin + count) of the stream. It is safe from several threads.
  void read(int64_t begin, int64_t count, int32_t* dst) const;

  // Returns one line, without the path, that changes when the data does. It has the numbers of
  // tokens and documents, and hashes (XXH3-128) of the .idx as it was opened, of the .targets, and
  // of the first and last MiB of the .bin.
  // It is cheap: it does not detect a change in the middle of a .bin that keeps its length.
  std::string fingerprint() const;

 private:
  std::string prefix_;
  TokenIndex index_;
  bool has_targets_ = false;
  std::vector<TokenSpan> targets_;
  Hash128 idx_hash_;
  File bin_;
};

// Throws Error{input} with the position of the first id outside [0, vocab_size). `begin` is the
// stream position of ids[0].
void check_token_ids(std::span<const int32_t> ids, int64_t vocab_size, int64_t begin, const std::string& prefix);

// Writes a dataset incrementally. The files appear under their names in close(), the .idx last.
// Without an .idx there is no dataset. A .targets is written when not all tokens are targets.
// Memory: 12 bytes per document, and 16 per span of targets.
class TokenDatasetWriter {
 public:
  TokenDatasetWriter(const std::string& prefix, TokenType type);
  ~TokenDatasetWriter();
  // Adds tokens to the open document. Throws Error{usage} for an id that the type cannot hold.
  void add_tokens(std::span<const int32_t> ids, bool are_targets = true);
  void end_document();  // a document without tokens is legal, and has no sequence
  void close();         // REQUIRES: no open document, at least one token
  int64_t num_tokens() const { return num_tokens_; }
  int64_t num_documents() const { return static_cast<int64_t>(document_ends_.size()); }

 private:
  void flush();
  void add_target_span(int64_t count);
  void write_targets();
  void write_index();

  std::string prefix_;
  TokenType type_;
  std::unique_ptr<PendingFile> bin_, idx_;
  std::vector<char> buffer_;  // tokens not yet written
  int64_t num_tokens_ = 0, sequence_tokens_ = 0;
  std::vector<int32_t> lengths_;
  std::vector<int64_t> document_ends_;  // in sequences
  bool all_targets_ = true;
  std::vector<TokenSpan> targets_;
};

}  // namespace moebius
