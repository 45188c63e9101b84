#include "core/log.h"

#include <algorithm>

namespace moebius {
namespace {

// Returns the text with control characters spelled out, as \x1b. Lines may quote data, which must not steer a terminal.
// The control characters that UTF-8 has as two bytes (U+0080 to U+009F) are among them.
std::string spelled_out(const std::string& text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto at = [&](size_t k) { return k < text.size() ? static_cast<unsigned char>(text[k]) : 0; };
    const bool is_wide = at(i) == 0xc2 && at(i + 1) >= 0x80 && at(i + 1) < 0xa0;
    const bool is_control = is_wide || at(i) == 0x7f || (at(i) < ' ' && text[i] != '\n' && text[i] != '\t');
    if (is_wide) ++i;
    out += is_control ? fmt::format("\\x{:02x}", at(i)) : text.substr(i, 1);
  }
  return out;
}

}  // namespace

void Log::line(const std::string& text) {
  if (quiet_) return;
  if (drawn_) std::fprintf(out_, "\r%*s\r", static_cast<int>(drawn_), "");
  drawn_ = 0;
  std::fprintf(out_, "%s\n", spelled_out(text).c_str());
  std::fflush(out_);
}

void Log::progress(const std::string& text, bool keep) {
  if (quiet_) return;
  if (!redraw_) {
    if (keep) line(text);
    return;
  }
  const size_t pad = drawn_ > text.size() ? drawn_ - text.size() : 0;
  std::fprintf(out_, "\r%s%*s", text.c_str(), static_cast<int>(pad), "");
  drawn_ = text.size() + pad;
  if (keep) {
    std::fputc('\n', out_);
    drawn_ = 0;
  }
  std::fflush(out_);
}

}  // namespace moebius
