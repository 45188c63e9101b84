#include "io/html_text.h"

#include "io/utf8.h"

namespace moebius {
namespace {

constexpr std::string_view kReplacement = "\xef\xbf\xbd";

}  // namespace

std::string valid_utf8(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const int64_t bad = find_invalid_utf8(text);
    const std::string_view good = text.substr(0, bad < 0 ? text.size() : static_cast<size_t>(bad));
    for (const char c : good) {
      const auto byte = static_cast<unsigned char>(c);
      if ((byte < 0x20 && c != '\t' && c != '\n') || byte == 0x7f)
        out += kReplacement;
      else
        out += c;
    }
    text.remove_prefix(good.size());
    if (text.empty()) break;
    out += kReplacement;
    text.remove_prefix(1);
  }
  return out;
}

std::string escape_html(std::string_view text) {
  std::string out;
  for (const char c : valid_utf8(text)) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

}  // namespace moebius
