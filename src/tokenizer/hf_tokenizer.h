// A tokenizer of Hugging Face's library, read from the tokenizer.json of a model's folder.
// It gives the same ids and the same text as that library.
// A feature of tokenizer.json that is not supported is an Error{input} that names it. There are two
// exceptions, which notice() reports:
// - Truncation and padding are ignored. Transformers, too, applies neither unless the caller asks
//   for it.
// - The ids of added tokens may leave a gap. The ids in the file are used.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tokenizer/added_tokens.h"
#include "tokenizer/bpe.h"
#include "tokenizer/normalizer.h"
#include "tokenizer/post_processor.h"
#include "tokenizer/pre_tokenizer.h"
#include "tokenizer/token_decoder.h"
#include "tokenizer/tokenizer.h"

namespace moebius {

class HfTokenizer : public Tokenizer {
 public:
  // Throws Error{input} when DIR/tokenizer.json is missing or wrong.
  static std::unique_ptr<HfTokenizer> open(const std::string& dir, const TokenizerOptions& options);
  // Does the same as open, given the text of DIR/tokenizer.json.
  static std::unique_ptr<HfTokenizer> parse(std::string_view text, const std::string& dir,
                                            const TokenizerOptions& options);

  std::string name() const override { return dir_; }
  int64_t vocab_size() const override { return static_cast<int64_t>(tokens_.size()); }
  // Returns the eos_token of tokenizer_config.json or special_tokens_map.json. If neither file has
  // one, it is the eos_token_id of config.json, or the first id if that is a list.
  // Throws Error{input} when none of these files has one.
  int32_t eod_id() const override;
  bool has_eod() const override { return eod_id_.has_value(); }
  std::string notice() const override { return notice_; }

  // Encoding is safe from several threads at once. Throws Error{input} for invalid UTF-8.
  void encode(std::string_view text, std::vector<int32_t>* ids, TextPart part = TextPart::whole) const override;
  bool encode_with_starts(std::string_view text, std::vector<int32_t>* ids, std::vector<size_t>* starts) const override;
  std::string_view unparsed_special(std::string_view text) const override;
  int64_t num_lost_bytes(std::string_view text) const override;
  std::string decode(std::span<const int32_t> ids) const override;

 private:
  struct Scratch {
    MatchScratch match;
    BpeScratch bpe;
    std::string normalized;
  };
  class Encoding;  // the state of encoding one text

  HfTokenizer(std::string dir, const TokenizerOptions& options) : dir_(std::move(dir)), options_(options) {}
  void read(const JsonField& file);
  void read_lengths(const JsonField& file);
  std::vector<AddedToken> read_added(const JsonField& field);
  void note_numbers(const JsonField& field, std::vector<AddedToken> added);
  void register_added(const std::vector<AddedToken>& added);
  void check_ids() const;
  std::optional<int32_t> find_eod() const;
  void check_utf8(std::string_view text) const;
  size_t num_bytes_of(int32_t id) const;  // bytes of the text of a token that is not an added one

  std::unique_ptr<Scratch> take_scratch() const;
  void release(std::unique_ptr<Scratch> scratch) const;

  std::string dir_, notice_;
  TokenizerOptions options_;
  Normalizer normalizer_;
  PreTokenizer pre_tokenizer_;
  Bpe bpe_;
  PostProcessor post_processor_;
  TokenDecoder decoder_;
  AddedTokenFinder added_raw_, added_normalized_;
  std::vector<std::string> tokens_;  // by id, added tokens too; empty where no token has the id
  std::vector<bool> is_special_;
  std::optional<int32_t> eod_id_;

  mutable std::mutex mutex_;  // protects spare_
  mutable std::vector<std::unique_ptr<Scratch>> spare_;
};

}  // namespace moebius
