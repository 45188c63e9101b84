#include "core/fault.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <charconv>
#include <csignal>
#include <cstdlib>
#include <new>
#include <string>
#include <string_view>

#include "core/error.h"

namespace moebius {
namespace {

enum class Mode { none, kill, stop, io_error, disk_full, no_memory, no_memory_noexcept };

struct Fault {
  std::string name;
  int64_t count = 0;
  Mode mode = Mode::none;
};

Mode mode_of(std::string_view text) {
  if (text.empty()) return Mode::kill;
  if (text == "stop") return Mode::stop;
  if (text == "throw") return Mode::io_error;
  if (text == "enospc") return Mode::disk_full;
  if (text == "nomem") return Mode::no_memory;
  if (text == "nomem_noexcept") return Mode::no_memory_noexcept;
  MOEBIUS_FAIL(usage, "MOEBIUS_FAULT: the mode must be stop, throw, enospc, nomem, nomem_noexcept or absent; got '{}'",
               text);
}

// Parses NAME:COUNT[:MODE].
// A text that cannot be parsed is an error: without its fault a test could not fail.
Fault parse(std::string_view text) {
  const size_t colon = text.find(':');
  MOEBIUS_CHECK(usage, colon != 0 && colon != text.npos, "MOEBIUS_FAULT: must be NAME:COUNT[:MODE]; got '{}'", text);
  Fault fault{.name = std::string(text.substr(0, colon))};
  const char* end = text.data() + text.size();
  const auto [rest, bad] = std::from_chars(text.data() + colon + 1, end, fault.count);
  MOEBIUS_CHECK(usage, bad == std::errc() && fault.count > 0 && (rest == end || *rest == ':'),
                "MOEBIUS_FAULT: COUNT must be a number from 1 on; got '{}'", text);
  fault.mode = mode_of(rest == end ? "" : std::string_view(rest + 1, end));
  return fault;
}

Fault asked_for() {
  const char* text = std::getenv("MOEBIUS_FAULT");
  return text ? parse(text) : Fault{};
}

// Each line is one write: lines of several threads do not mix, and a SIGKILL loses none.
void append_line(const char* path, const char* name) {
  const std::string line = fmt::format("{}\n", name);
  const int file = ::open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  const bool written = file >= 0 && ::write(file, line.data(), line.size()) == static_cast<ssize_t>(line.size());
  if (file >= 0) ::close(file);
  MOEBIUS_CHECK(io, written, "MOEBIUS_FAULT_LOG: cannot append to '{}'", path);
}

[[noreturn]] void run_out_of_memory() { throw std::bad_alloc(); }
void run_out_in_noexcept() noexcept { run_out_of_memory(); }

}  // namespace

void fault_point(const char* name) {
  static const Fault fault = asked_for();
  static const char* const log = std::getenv("MOEBIUS_FAULT_LOG");
  static std::atomic<int64_t> hits{0};
  if (log) append_line(log, name);
  if (fault.mode == Mode::none || fault.name != name) return;
  const int64_t hit = ++hits;
  if (fault.mode == Mode::kill && hit == fault.count) ::raise(SIGKILL);
  if (fault.mode == Mode::stop && hit == fault.count) ::raise(SIGSTOP);
  if (fault.mode == Mode::io_error && hit == fault.count)
    MOEBIUS_FAIL(io, "{}: Input/output error (a test's fault)", name);
  if (fault.mode == Mode::no_memory && hit == fault.count) run_out_of_memory();
  if (fault.mode == Mode::no_memory_noexcept && hit == fault.count) run_out_in_noexcept();
  if (fault.mode == Mode::disk_full && hit >= fault.count) {
    MOEBIUS_FAIL(io, "{}: No space left on device (a test's fault)", name);
  }
}

}  // namespace moebius
