#include "config/nearest.h"

#include <algorithm>
#include <numeric>

#include "core/error.h"

namespace moebius {

namespace {

std::string_view last_part(std::string_view key) { return key.substr(key.rfind('.') + 1); }

int distance(std::string_view name, std::string_view candidate) {
  const int whole = edit_distance(name, candidate);
  return last_part(name) == last_part(candidate) ? std::min(whole, 1) : whole;
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
  MOEBIUS_ASSERT(!candidates.empty());
  const auto closer = [&](const std::string& a, const std::string& b) { return distance(name, a) < distance(name, b); };
  return *std::min_element(candidates.begin(), candidates.end(), closer);
}

}  // namespace moebius
