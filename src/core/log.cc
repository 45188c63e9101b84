#include "core/log.h"

#include <algorithm>

namespace moebius {

void Log::line(const std::string& text) {
  if (quiet_) return;
  if (drawn_) std::fprintf(out_, "\r%*s\r", static_cast<int>(drawn_), "");
  drawn_ = 0;
  std::fprintf(out_, "%s\n", text.c_str());
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
