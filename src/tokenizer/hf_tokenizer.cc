#include "tokenizer/hf_tokenizer.h"

#include "core/error.h"
#include "io/utf8.h"

namespace moebius {

// Encodes the pieces between added tokens: pieces to words, and words to ids.
class HfTokenizer::Encoding : public WordSink {
 public:
  Encoding(const HfTokenizer& of, Scratch& scratch, std::vector<int32_t>* ids)
      : of_(of), scratch_(scratch), ids_(ids) {}

  void text(std::string_view text) {
    of_.added_raw_.split(text, of_.options_.parse_special, scratch_.match,
                         [&](std::string_view piece, const AddedToken* token) {
                           if (token != nullptr) return ids_->push_back(token->id);
                           raw_piece(piece, piece.data() == text.data());
                         });
  }

  void word(std::string_view word) override { of_.bpe_.encode(word, &scratch_.bpe, ids_); }

 private:
  void raw_piece(std::string_view piece, bool is_first) {
    if (of_.normalizer_.is_identity()) return normalized_piece(piece, is_first);
    scratch_.normalized.assign(piece);
    of_.normalizer_.apply(&scratch_.normalized, scratch_.match);
    normalized_piece(scratch_.normalized, is_first);
  }

  void normalized_piece(std::string_view piece, bool is_first) {
    of_.added_normalized_.split(
        piece, of_.options_.parse_special, scratch_.match, [&](std::string_view part, const AddedToken* token) {
          if (token != nullptr) return ids_->push_back(token->id);
          of_.pre_tokenizer_.split(part, is_first && part.data() == piece.data(), scratch_.match, this);
        });
  }

  const HfTokenizer& of_;
  Scratch& scratch_;
  std::vector<int32_t>* ids_;
};

int32_t HfTokenizer::eod_id() const {
  MOEBIUS_CHECK(input, eod_id_.has_value(),
                "{}: expected an end-of-document token; got no eos_token in tokenizer_config.json or "
                "special_tokens_map.json and no eos_token_id in config.json; add one of them",
                dir_);
  return *eod_id_;
}

void HfTokenizer::encode(std::string_view text, std::vector<int32_t>* ids, TextPart part) const {
  const int64_t invalid = find_invalid_utf8(text);
  MOEBIUS_CHECK(input, invalid < 0,
                "tokenizer {}: expected UTF-8 text; got an invalid byte at offset {}; convert the text to UTF-8", dir_,
                invalid);
  std::unique_ptr<Scratch> scratch = take_scratch();
  const std::vector<int32_t>&before = post_processor_.before, &after = post_processor_.after;
  if (options_.add_special && part != TextPart::end) ids->insert(ids->end(), before.begin(), before.end());
  Encoding(*this, *scratch, ids).text(text);
  if (options_.add_special && part != TextPart::beginning) ids->insert(ids->end(), after.begin(), after.end());
  give_back(std::move(scratch));
}

std::string_view HfTokenizer::unparsed_special(std::string_view text) const {
  if (options_.parse_special) return {};
  for (const AddedTokenFinder* finder : {&added_raw_, &added_normalized_})
    if (const AddedToken* token = finder->first_special(text)) return token->content;
  return {};
}

std::string HfTokenizer::decode(std::span<const int32_t> ids) const {
  std::vector<std::string> tokens;
  for (const int32_t id : ids) {
    MOEBIUS_CHECK(usage, 0 <= id && id < vocab_size(),
                  "tokenizer {}: expected ids in [0, {}]; got {}; use the model's tokenizer", dir_, vocab_size() - 1,
                  id);
    if (!is_special_[id] && id != eod_id_.value_or(-1) && !tokens_[id].empty()) tokens.push_back(tokens_[id]);
  }
  std::unique_ptr<Scratch> scratch = take_scratch();
  std::string text = decoder_.decode(std::move(tokens), scratch->match);
  give_back(std::move(scratch));
  return text;
}

std::unique_ptr<HfTokenizer::Scratch> HfTokenizer::take_scratch() const {
  const std::lock_guard lock(mutex_);
  if (spare_.empty()) return std::make_unique<Scratch>();
  std::unique_ptr<Scratch> scratch = std::move(spare_.back());
  spare_.pop_back();
  return scratch;
}

void HfTokenizer::give_back(std::unique_ptr<Scratch> scratch) const {
  const std::lock_guard lock(mutex_);
  spare_.push_back(std::move(scratch));
}

}  // namespace moebius
