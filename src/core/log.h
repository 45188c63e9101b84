// The log holds what a run prints for people: lines and one progress line, on one FILE.
// Results of a command never go through it.
#pragma once

#include <cstdio>
#include <string>

#include "core/error.h"

namespace moebius {

class Log {
 public:
  // out: usually stderr.
  // redraw: the progress line overwrites itself (a terminal); otherwise each is a new line.
  Log(std::FILE* out, bool redraw, bool quiet = false) : out_(out), redraw_(redraw), quiet_(quiet) {}

  template <class... Args>
  void info(fmt::format_string<Args...> format, Args&&... args) {
    line(fmt::format(format, std::forward<Args>(args)...));
  }
  template <class... Args>
  void warn(fmt::format_string<Args...> format, Args&&... args) {
    line("warning: " + fmt::format(format, std::forward<Args>(args)...));
  }

  void line(const std::string& text);
  // keep: the line remains on the screen when the next one is written.
  // Without redraw only lines with `keep` are printed, so that a log file stays readable.
  void progress(const std::string& text, bool keep);
  bool redraws() const { return redraw_; }
  bool is_quiet() const { return quiet_; }

 private:
  std::FILE* out_;
  bool redraw_, quiet_;
  size_t drawn_ = 0;  // characters of the progress line now on the screen
};

}  // namespace moebius
