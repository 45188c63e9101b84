// Text to token ids and back.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace moebius {

// A text that is encoded in two parts, a prompt and its completion, has what the model wants around it once.
enum class TextPart { whole, beginning, end };

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  virtual std::string name() const = 0;    // what open_tokenizer takes
  virtual int64_t vocab_size() const = 0;  // ids are in [0, vocab_size)
  // What its folder asks for and encode does not do, for a warning; empty: nothing.
  virtual std::string notice() const { return ""; }
  virtual int32_t eod_id() const = 0;  // ends a document; no text encodes to it, unless special tokens are parsed
  // Appends the ids of `text`. Pieces of a text may not encode to pieces of its ids.
  virtual void encode(std::string_view text, std::vector<int32_t>* ids, TextPart part = TextPart::whole) const = 0;
  // A special token that is spelled out in a text and that encode takes for its letters; empty: none.
  virtual std::string_view unparsed_special(std::string_view /*text*/) const { return {}; }
  // The text; eod_id gives none. Error{usage} for an id outside the vocabulary.
  virtual std::string decode(std::span<const int32_t> ids) const = 0;
};

// The defaults are those of Hugging Face's library. Folders only.
struct TokenizerOptions {
  bool parse_special = true;  // special tokens that are spelled out in a text are themselves, not their letters
  bool add_special = true;    // the ids that the model wants around each text, such as one that begins it
};

// "bytes": ids 0 to 255 are the bytes, 256 ends a document. Any other name: a
// folder with a tokenizer.json (tokenizer/hf_tokenizer.h).
std::unique_ptr<Tokenizer> open_tokenizer(const std::string& name, const TokenizerOptions& options = {});

}  // namespace moebius
