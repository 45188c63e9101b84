#include "data/target_spans.h"

#include "core/error.h"
#include "data/unaligned_values.h"

namespace moebius {
namespace {

constexpr std::string_view kMagic("MOEBTGT\0", 8);
constexpr size_t kHeaderBytes = 32, kSpanBytes = 16;
constexpr std::string_view kDamaged = "the dataset is damaged; build it again";

}  // namespace

std::string target_spans_text(const std::vector<TokenSpan>& spans, int64_t num_tokens) {
  std::string text(kMagic);
  text.reserve(kHeaderBytes + kSpanBytes * spans.size());
  store<uint64_t>(&text, 1);
  store<uint64_t>(&text, num_tokens);
  store<uint64_t>(&text, spans.size());
  for (const TokenSpan& span : spans) {
    store(&text, span.begin);
    store(&text, span.end);
  }
  return text;
}

std::vector<TokenSpan> parse_target_spans(std::string_view bytes, int64_t num_tokens, const std::string& who) {
  MOEBIUS_CHECK(input, bytes.size() >= kHeaderBytes && bytes.starts_with(kMagic) && load<uint64_t>(bytes, 8) == 1,
                "{}: expected target spans of version 1; got {} other bytes; {}", who, bytes.size(), kDamaged);
  const auto tokens = load<uint64_t>(bytes, 16), count = load<uint64_t>(bytes, 24);
  MOEBIUS_CHECK(input, tokens == static_cast<uint64_t>(num_tokens),
                "{}: expected the spans of {} tokens, as the .bin has; got those of {}; {}", who, num_tokens, tokens,
                kDamaged);
  MOEBIUS_CHECK(input, count <= bytes.size() && kHeaderBytes + kSpanBytes * count == bytes.size(),
                "{}: expected {} + 16 spans bytes; got {} bytes, {} spans; {}", who, kHeaderBytes, bytes.size(), count,
                kDamaged);
  std::vector<TokenSpan> spans(count);
  int64_t previous = -1;
  for (size_t i = 0; i < count; ++i) {
    const size_t at = kHeaderBytes + kSpanBytes * i;
    spans[i] = {.begin = load<int64_t>(bytes, at), .end = load<int64_t>(bytes, at + 8)};
    MOEBIUS_CHECK(input, spans[i].begin > previous && spans[i].begin < spans[i].end && spans[i].end <= num_tokens,
                  "{}: expected spans that rise within {} tokens; got [{}, {}) as span {}; {}", who, num_tokens,
                  spans[i].begin, spans[i].end, i, kDamaged);
    previous = spans[i].end;
  }
  return spans;
}

}  // namespace moebius
