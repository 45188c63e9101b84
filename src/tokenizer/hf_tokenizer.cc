#include "tokenizer/hf_tokenizer.h"

#include <algorithm>
#include <functional>

#include "core/error.h"
#include "io/utf8.h"

namespace moebius {

// Encodes the pieces between added tokens: pieces to words, and words to ids.
class HfTokenizer::Encoding : public WordSink {
 public:
  Encoding(const HfTokenizer& of, Scratch& scratch, std::vector<int32_t>* ids, std::vector<size_t>* starts = nullptr)
      : of_(of), scratch_(scratch), ids_(ids), starts_(starts) {}

  void text(std::string_view text) {
    whole_ = text;
    of_.added_raw_.split(text, of_.options_.parse_special, scratch_.match,
                         [&](std::string_view piece, const AddedToken* token) {
                           if (token != nullptr) return added(piece, *token);
                           raw_piece(piece, piece.data() == text.data());
                         });
  }

  void word(std::string_view word) override {
    const size_t before = ids_->size();
    of_.bpe_.encode(word, &scratch_.bpe, ids_);
    if (starts_ == nullptr) return;
    size_t at = place_of(word);
    const size_t end = at + word.size();
    for (size_t i = before; i < ids_->size(); ++i) {
      starts_->push_back(at);
      at += of_.num_bytes_of((*ids_)[i]);
    }
    knows_starts_ &= at == end;
  }
  bool knows_starts() const { return knows_starts_; }

 private:
  void added(std::string_view piece, const AddedToken& token) {
    ids_->push_back(token.id);
    if (starts_ != nullptr) starts_->push_back(place_of(piece));
  }

  // Returns the byte of the whole text where a part of it begins.
  size_t place_of(std::string_view part) {
    const std::less_equal<const char*> is_before;
    if (is_before(whole_.data(), part.data()) && is_before(part.data() + part.size(), whole_.data() + whole_.size()))
      return static_cast<size_t>(part.data() - whole_.data());
    const std::string& normalized = scratch_.normalized;
    if (is_unchanged_ && is_before(normalized.data(), part.data()) &&
        is_before(part.data() + part.size(), normalized.data() + normalized.size()))
      return normalized_at_ + static_cast<size_t>(part.data() - normalized.data());
    knows_starts_ = false;
    return 0;
  }

  void raw_piece(std::string_view piece, bool is_first) {
    if (of_.normalizer_.is_identity()) return normalized_piece(piece, is_first);
    scratch_.normalized.assign(piece);
    of_.normalizer_.apply(&scratch_.normalized, scratch_.match);
    normalized_at_ = static_cast<size_t>(piece.data() - whole_.data());
    is_unchanged_ = scratch_.normalized == piece;
    normalized_piece(scratch_.normalized, is_first);
  }

  void normalized_piece(std::string_view piece, bool is_first) {
    of_.added_normalized_.split(
        piece, of_.options_.parse_special, scratch_.match, [&](std::string_view part, const AddedToken* token) {
          if (token != nullptr) return added(part, *token);
          of_.pre_tokenizer_.split(part, is_first && part.data() == piece.data(), scratch_.match, this);
        });
  }

  const HfTokenizer& of_;
  Scratch& scratch_;
  std::vector<int32_t>* ids_;
  std::vector<size_t>* starts_;  // null: the caller does not need them
  std::string_view whole_;
  bool knows_starts_ = true, is_unchanged_ = false;
  size_t normalized_at_ = 0;  // where in the whole text the normalized piece begins
};

int32_t HfTokenizer::eod_id() const {
  MOEBIUS_CHECK(input, eod_id_.has_value(),
                "{}: expected an end-of-document token; got no eos_token in tokenizer_config.json or "
                "special_tokens_map.json and no eos_token_id in config.json; add one of them",
                dir_);
  return *eod_id_;
}

void HfTokenizer::check_utf8(std::string_view text) const {
  const int64_t invalid = find_invalid_utf8(text);
  MOEBIUS_CHECK(input, invalid < 0,
                "tokenizer {}: expected UTF-8 text; got an invalid byte at offset {}; convert the text to UTF-8", dir_,
                invalid);
}

void HfTokenizer::encode(std::string_view text, std::vector<int32_t>* ids, TextPart part) const {
  check_utf8(text);
  std::unique_ptr<Scratch> scratch = take_scratch();
  const std::vector<int32_t>&before = post_processor_.before, &after = post_processor_.after;
  if (options_.add_special && part != TextPart::end) ids->insert(ids->end(), before.begin(), before.end());
  Encoding(*this, *scratch, ids).text(text);
  if (options_.add_special && part != TextPart::beginning) ids->insert(ids->end(), after.begin(), after.end());
  release(std::move(scratch));
}

bool HfTokenizer::encode_with_starts(std::string_view text, std::vector<int32_t>* ids,
                                     std::vector<size_t>* starts) const {
  MOEBIUS_ASSERT(!options_.add_special);
  check_utf8(text);
  std::unique_ptr<Scratch> scratch = take_scratch();
  Encoding encoding(*this, *scratch, ids, starts);
  encoding.text(text);
  release(std::move(scratch));
  if (!encoding.knows_starts()) starts->clear();
  return encoding.knows_starts();
}

// In the byte-level alphabet a character is a byte. Without it, a token <0x41> is a byte too.
size_t HfTokenizer::num_bytes_of(int32_t id) const {
  const std::string& token = tokens_[id];
  if (pre_tokenizer_.is_byte_level())
    return static_cast<size_t>(
        std::count_if(token.begin(), token.end(), [](char c) { return (static_cast<uint8_t>(c) & 0xC0) != 0x80; }));
  return token.size() == 6 && token.starts_with("<0x") ? 1 : token.size();
}

std::string_view HfTokenizer::unparsed_special(std::string_view text) const {
  if (options_.parse_special) return {};
  for (const AddedTokenFinder* finder : {&added_raw_, &added_normalized_})
    if (const AddedToken* token = finder->first_special(text)) return token->content;
  return {};
}

int64_t HfTokenizer::num_lost_bytes(std::string_view text) const {
  if (!bpe_.loses_bytes()) return 0;
  std::unique_ptr<Scratch> scratch = take_scratch();
  std::string normalized(text);
  normalizer_.apply(&normalized, scratch->match);
  release(std::move(scratch));
  return std::count_if(normalized.begin(), normalized.end(),
                       [&](char c) { return bpe_.loses(static_cast<uint8_t>(c)); });
}

std::string HfTokenizer::decode(std::span<const int32_t> ids) const {
  std::vector<std::string> tokens;
  for (const int32_t id : ids) {
    MOEBIUS_CHECK(usage, 0 <= id && id < vocab_size(),
                  "tokenizer {}: expected ids in [0, {}]; got {}; use the model's tokenizer", dir_, vocab_size() - 1,
                  id);
    const bool is_shown = options_.show_special || (!is_special_[id] && id != eod_id_.value_or(-1));
    if (is_shown && !tokens_[id].empty()) tokens.push_back(tokens_[id]);
  }
  std::unique_ptr<Scratch> scratch = take_scratch();
  std::string text = decoder_.decode(std::move(tokens), scratch->match);
  release(std::move(scratch));
  return text;
}

std::unique_ptr<HfTokenizer::Scratch> HfTokenizer::take_scratch() const {
  const std::lock_guard lock(mutex_);
  if (spare_.empty()) return std::make_unique<Scratch>();
  std::unique_ptr<Scratch> scratch = std::move(spare_.back());
  spare_.pop_back();
  return scratch;
}

void HfTokenizer::release(std::unique_ptr<Scratch> scratch) const {
  const std::lock_guard lock(mutex_);
  spare_.push_back(std::move(scratch));
}

}  // namespace moebius
