#include "config/nearest.h"

#include <algorithm>
#include <iterator>
#include <numeric>

#include "core/error.h"

namespace moebius {

namespace {

std::string_view last_part(std::string_view key) { return key.substr(key.rfind('.') + 1); }
std::string_view first_part(std::string_view key) { return key.substr(0, key.find('.')); }

int distance(std::string_view name, std::string_view candidate) {
  const int whole = edit_distance(name, candidate);
  return last_part(name) == last_part(candidate) ? std::min(whole, 1) : whole;
}

// Returns the distance of two keys. A typing error in the last part counts the same if the section is wrong too. A name
// without a dot may be a section.
int distance_of_keys(std::string_view name, std::string_view candidate) {
  int last = edit_distance(last_part(name), last_part(candidate));
  if (name.find('.') == std::string_view::npos) last = std::min(last, edit_distance(name, first_part(candidate)));
  return std::min(edit_distance(name, candidate), last + 1);
}

std::string closest(std::string_view name, const std::vector<std::string>& candidates,
                    int (*measure)(std::string_view, std::string_view)) {
  MOEBIUS_ASSERT(!candidates.empty());
  const auto closer = [&](const std::string& a, const std::string& b) { return measure(name, a) < measure(name, b); };
  return *std::min_element(candidates.begin(), candidates.end(), closer);
}

// Allows one edit for every three letters. Two swapped letters are two edits, which a word of five
// letters may have.
bool is_near(std::string_view a, std::string_view b) {
  return edit_distance(a, b) <= (static_cast<int>(std::max(a.size(), b.size())) + 1) / 3;
}

// In another section only an equal word counts, and it must not be too short.
bool is_slip(std::string_view name, std::string_view candidate) {
  const std::string_view last = last_part(candidate), section = first_part(candidate);
  if (name.find('.') == std::string_view::npos) return is_near(name, section) || is_near(name, last);
  if (is_near(first_part(name), section)) return is_near(last_part(name), last);
  return last_part(name) == last && last.size() > 4;
}

}  // namespace

int edit_distance(std::string_view a, std::string_view b) {
  std::vector<int> row(b.size() + 1);  // row[j]: distance of a[0, i) and b[0, j)
  std::iota(row.begin(), row.end(), 0);
  for (size_t i = 1; i <= a.size(); ++i) {
    int diagonal = row[0];
    row[0] = static_cast<int>(i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const int substituted = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, substituted});
    }
  }
  return row.back();
}

std::string nearest(std::string_view name, const std::vector<std::string>& candidates) {
  return closest(name, candidates, distance);
}

std::string nearest_if_near(std::string_view name, const std::vector<std::string>& candidates) {
  std::vector<std::string> slips;
  std::copy_if(candidates.begin(), candidates.end(), std::back_inserter(slips),
               [&](const std::string& candidate) { return is_slip(name, candidate); });
  return slips.empty() ? "" : closest(name, slips, distance_of_keys);
}

}  // namespace moebius
