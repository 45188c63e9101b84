#include "tokenizer/tokenizer.h"

#include "core/error.h"
#include "tokenizer/hf_tokenizer.h"

namespace moebius {
namespace {

class ByteTokenizer : public Tokenizer {
 public:
  std::string name() const override { return "bytes"; }
  int64_t vocab_size() const override { return kEod + 1; }
  int32_t eod_id() const override { return kEod; }

  void encode(std::string_view text, std::vector<int32_t>* ids, TextPart) const override {
    ids->reserve(ids->size() + text.size());
    for (const char c : text) ids->push_back(static_cast<uint8_t>(c));
  }

  bool encode_with_starts(std::string_view text, std::vector<int32_t>* ids,
                          std::vector<size_t>* starts) const override {
    encode(text, ids, TextPart::whole);
    for (size_t i = 0; i < text.size(); ++i) starts->push_back(i);
    return true;
  }

  std::string decode(std::span<const int32_t> ids) const override {
    std::string text;
    for (const int32_t id : ids) {
      MOEBIUS_CHECK(usage, 0 <= id && id <= kEod,
                    "bytes tokenizer: expected ids in [0, {}]; got {}; use the model's tokenizer", kEod, id);
      if (id != kEod) text.push_back(static_cast<char>(id));
    }
    return text;
  }

 private:
  static constexpr int32_t kEod = 256;
};

}  // namespace

std::unique_ptr<Tokenizer> open_tokenizer(const std::string& name, const TokenizerOptions& options) {
  if (name == "bytes") return std::make_unique<ByteTokenizer>();
  return HfTokenizer::open(name, options);
}

}  // namespace moebius
