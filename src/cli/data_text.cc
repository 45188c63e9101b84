#include "cli/data_text.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <span>

namespace moebius {

std::vector<DocumentPart> document_parts(const TokenDataset& data, int64_t document, int64_t max_tokens) {
  const int64_t begin = data.document_begins()[document], end = data.document_begins()[document + 1];
  std::vector<int32_t> ids(std::min(max_tokens, end - begin));
  data.read(begin, std::ssize(ids), ids.data());
  const std::span<const TokenSpan> spans = data.target_spans();
  auto span = std::partition_point(spans.begin(), spans.end(), [&](const TokenSpan& s) { return s.end <= begin; });
  std::vector<DocumentPart> parts;
  for (int64_t i = 0; i < std::ssize(ids); ++i) {
    if (span != spans.end() && span->end <= begin + i) ++span;
    const bool has_loss = !data.has_targets() || (span != spans.end() && span->begin <= begin + i);
    if (parts.empty() || parts.back().has_loss != has_loss) parts.push_back({.has_loss = has_loss});
    parts.back().ids.push_back(ids[i]);
  }
  return parts;
}

std::string quoted_text(const std::vector<int32_t>& ids, const Tokenizer& tokenizer) {
  // A tokenizer of chats may have no such id.
  const int32_t eod = tokenizer.has_eod() ? tokenizer.eod_id() : -1;
  const bool is_spelled = eod < 0 || !tokenizer.decode({&eod, 1}).empty();
  std::string text;
  const auto add = [&](const std::string& piece) { text += (text.empty() ? "" : " + ") + piece; };
  for (auto at = ids.begin(); at != ids.end();) {
    const auto end = is_spelled ? ids.end() : std::find(at, ids.end(), eod);
    using Replace = nlohmann::json::error_handler_t;
    if (end != at) add(nlohmann::json(tokenizer.decode({at, end})).dump(-1, ' ', false, Replace::replace));
    if (end == ids.end()) break;
    add("end");
    at = end + 1;
  }
  return text;
}

}  // namespace moebius
