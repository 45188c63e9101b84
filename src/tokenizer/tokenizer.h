// Tokenizers turn text into token ids and back.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace moebius {

// The part of a text that is encoded. The ids that a model expects around a text are added once to
// a text that is encoded in two parts, a prompt (beginning) and its completion (end).
enum class TextPart { whole, beginning, end };

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  virtual std::string name() const = 0;    // the name that open_tokenizer takes
  virtual int64_t vocab_size() const = 0;  // ids are in [0, vocab_size)
  // Returns a warning about settings of the tokenizer's folder that encode ignores; empty if
  // there are none.
  virtual std::string notice() const { return ""; }
  // Returns the id that ends a document; no text encodes to it unless special tokens are parsed. Throws Error{input}
  // where the tokenizer has none.
  virtual int32_t eod_id() const = 0;
  virtual bool has_eod() const { return true; }  // whether eod_id() returns an id instead of throwing
  // Appends the ids of `text`. The ids of a part of a text need not be a part of the ids of
  // the whole text.
  virtual void encode(std::string_view text, std::vector<int32_t>* ids, TextPart part = TextPart::whole) const = 0;
  // Appends the ids of a whole text like encode, and in starts the byte of the text where each of them
  // begins. Returns false, with no starts, if a rule that changes the text makes these positions unknown.
  // REQUIRES: options without add_special.
  virtual bool encode_with_starts(std::string_view text, std::vector<int32_t>* ids, std::vector<size_t>* starts) const {
    encode(text, ids);
    return starts->empty() && text.empty();
  }
  // Returns a special token that is spelled out in `text` and that encode would encode letter by
  // letter; empty if there is none.
  virtual std::string_view unparsed_special(std::string_view /*text*/) const { return {}; }
  // Returns how many bytes of `text` encode leaves out: the vocabulary has no token for them, and none for unknown
  // characters. Only byte-level vocabularies are asked; others return 0.
  virtual int64_t num_lost_bytes(std::string_view /*text*/) const { return 0; }
  // Returns the text of `ids`; eod_id adds nothing to it. Throws Error{usage} for an id
  // outside the vocabulary.
  virtual std::string decode(std::span<const int32_t> ids) const = 0;
};

// The defaults are those of Hugging Face's library. Only tokenizers read from a folder
// have these options.
struct TokenizerOptions {
  bool parse_special = true;  // a special token spelled out in a text is encoded as that token
  bool add_special = true;    // adds the ids that the model expects around each text, such as a first token
  bool show_special = false;  // decode spells out special tokens and eod_id, which otherwise add nothing
};

// Opens the tokenizer "bytes" or the one in a folder.
// - "bytes": ids 0 to 255 are the bytes, and 256 ends a document.
// - Any other name is a folder with a tokenizer.json (tokenizer/hf_tokenizer.h).
std::unique_ptr<Tokenizer> open_tokenizer(const std::string& name, const TokenizerOptions& options = {});

}  // namespace moebius
