// Reads any bytes as a .jsonl file. They are refused with Error{input}, or give documents in UTF-8.
// The documents are the same whether the lines are parsed together or one by one.
#include <cstdlib>
#include <string_view>

#include "core/error.h"
#include "data/text_input.h"
#include "io/utf8.h"

namespace {

using namespace moebius;

void require(bool holds) {
  if (!holds) std::abort();
}

TextBlock block_of(std::string_view bytes) { return {.path = "fuzz", .bytes = std::string(bytes), .is_jsonl = true}; }

std::vector<Document> line_by_line(std::string_view bytes) {
  std::vector<Document> all;
  for (size_t begin = 0; begin < bytes.size();) {
    const size_t end = std::min(bytes.find('\n', begin), bytes.size());
    for (Document& document : documents_of(block_of(bytes.substr(begin, end - begin))))
      all.push_back(std::move(document));
    begin = end + 1;
  }
  return all;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  try {
    const std::vector<Document> documents = documents_of(block_of(bytes)), again = line_by_line(bytes);
    require(documents.size() == again.size());
    for (size_t i = 0; i < documents.size(); ++i) {
      require(documents[i].text == again[i].text && documents[i].prompt == again[i].prompt);
      require(find_invalid_utf8(documents[i].text) < 0 && find_invalid_utf8(documents[i].prompt) < 0);
    }
  } catch (const Error& e) {
    require(e.kind() == ErrorKind::input);
  }
  return 0;
}
