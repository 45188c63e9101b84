#include "data/packing.h"

namespace moebius {

std::vector<TokenSpan> pack_documents(std::span<const int64_t> document_begins, int64_t seq_len) {
  std::vector<TokenSpan> samples;
  int64_t begin = 0, end = 0;  // range of the sample that is being filled
  const auto close = [&](int64_t next_begin) {
    if (end > begin) samples.push_back({begin, end});
    begin = next_begin;
  };
  for (size_t d = 0; d + 1 < document_begins.size(); ++d) {
    const int64_t document = document_begins[d], document_end = document_begins[d + 1];
    if (document_end - begin > seq_len + 1) close(document);
    while (document_end - begin > seq_len + 1) {
      end = begin + seq_len + 1;
      close(end - 1);
    }
    end = document_end;
  }
  close(end);
  return samples;
}

}  // namespace moebius
