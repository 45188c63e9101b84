// The file PREFIX.targets says which tokens of a dataset are targets of the loss, if not all of
// them are. It is in the folder of PREFIX.bin; readers of Megatron's format ignore it.
//
//   8 B "MOEBTGT\0" | u64 version = 1 | u64 tokens of the .bin | u64 spans |
//   per span int64 first token, int64 end
//
// All values are little-endian. Spans are sorted, with at least one token between two of them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace moebius {

struct TokenSpan {
  int64_t begin = 0, end = 0;  // [begin, end)
  bool operator==(const TokenSpan&) const = default;
};

std::string target_spans_text(const std::vector<TokenSpan>& spans, int64_t num_tokens);

// Throws Error{input} that names `who` unless the bytes are spans of a dataset
// of num_tokens tokens.
std::vector<TokenSpan> parse_target_spans(std::string_view bytes, int64_t num_tokens, const std::string& who);

}  // namespace moebius
