#include "report/plot/text.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <ctime>

#include "io/html_text.h"

namespace moebius {
namespace {

std::string scaled_text(double value, double step, const char* const* units, size_t num_units) {
  size_t at = 0;
  while (std::abs(value) >= step * 0.9995 && at + 1 < num_units) {
    value /= step;
    ++at;
  }
  const double size = std::abs(value);
  const int digits = size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2;
  std::string text = fmt::format("{:.{}f}", value, at == 0 && value == std::floor(value) ? 0 : digits);
  if (*units[at] != 0) text += std::string(" ") + units[at];
  return text;
}

std::string seconds_text(double s) {
  const double size = std::abs(s);
  if (size == 0) return "0 s";
  if (size < 1e-3) return fmt::format("{:.3g} us", s * 1e6);
  if (size < 1) return fmt::format("{:.3g} ms", s * 1e3);
  return size < 100 ? fmt::format("{:.3g} s", s) : fmt::format("{:.0f} s", s);
}

}  // namespace

std::string json_string(std::string_view text) {
  std::string out = "\"";
  for (const char c : valid_utf8(text)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || c == '"' || c == '\\' || c == '<' || c == '>' || c == '&')
      out += fmt::format("\\u{:04x}", byte);
    else
      out += c;
  }
  return out + '"';
}

std::string truncated(std::string_view text, size_t max_chars) {
  size_t characters = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if ((static_cast<unsigned char>(text[i]) & 0xc0) == 0x80) continue;
    if (++characters > max_chars) return std::string(text.substr(0, i)) + "\xe2\x80\xa6";
  }
  return std::string(text);
}

std::string number_text(double value, Unit unit) {
  static constexpr std::array<const char*, 6> kCounts{"", "k", "M", "G", "T", "P"};
  static constexpr std::array<const char*, 6> kBytes{"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  if (!std::isfinite(value)) return "none";
  switch (unit) {
    case Unit::bytes:
      return scaled_text(value, 1024, kBytes.data(), kBytes.size());
    case Unit::count:
      if (std::abs(value) < 1e4) break;
      return scaled_text(value, 1000, kCounts.data(), kCounts.size());
    case Unit::seconds:
      return seconds_text(value);
    case Unit::ratio:
      return fmt::format("{:.3g} %", value * 100);
    case Unit::plain:
      break;
  }
  if (value != 0 && (std::abs(value) < 1e-3 || std::abs(value) >= 1e6)) return fmt::format("{:.2e}", value);
  return fmt::format("{:.4g}", value);
}

std::string digits_text(double value) { return std::isfinite(value) ? fmt::format("{:.5g}", value) : "null"; }

std::string duration_text_of(double seconds) {
  if (seconds < 60) return fmt::format("{:.1f} s", seconds);
  const auto s = static_cast<int64_t>(std::min(seconds, 1e15));
  if (s >= 86400) return fmt::format("{} d {} h", s / 86400, s / 3600 % 24);
  if (s >= 3600) return fmt::format("{} h {:02} min", s / 3600, s / 60 % 60);
  return fmt::format("{} min {:02} s", s / 60, s % 60);
}

std::string time_text(double seconds) {
  const auto whole = static_cast<std::time_t>(seconds);
  std::tm utc = {};
  if (seconds <= 0 || !::gmtime_r(&whole, &utc)) return "at an unknown time";
  return fmt::format("{:04}-{:02}-{:02} {:02}:{:02}:{:02} UTC", utc.tm_year + 1900, utc.tm_mon + 1, utc.tm_mday,
                     utc.tm_hour, utc.tm_min, utc.tm_sec);
}

}  // namespace moebius
