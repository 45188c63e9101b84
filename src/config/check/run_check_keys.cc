#include "config/check/run_check_keys.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <string_view>

#include "config/recipe/table.h"
#include "core/error.h"

namespace moebius {

std::string origin(const RunSpec& s, const std::string& key) {
  const auto found = s.provenance.find(key);
  return found == s.provenance.end() ? "" : fmt::format(" [{}]", found->second);
}

void refuse_idle(const RunSpec& s, const char* key, const std::string& why) {
  static const RunSpec defaults;
  static const std::map<std::string_view, const RecipeKey*> keys = [] {
    std::map<std::string_view, const RecipeKey*> by_name;
    for (const RecipeKey& each : recipe_table()) by_name[each.name] = &each;
    return by_name;
  }();
  const auto found = keys.find(key);
  if (found == keys.end()) return;
  const nlohmann::json value = found->second->write(s);
  MOEBIUS_CHECK(usage, value == found->second->write(defaults), "{} = {} would do nothing: {}{}", key, shown(value),
                why, origin(s, key));
}

int64_t largest_divisor(int64_t n, int64_t at_most) {
  int64_t divisor = std::clamp<int64_t>(at_most, 1, std::max<int64_t>(n, 1));
  while (n % divisor != 0) --divisor;
  return divisor;
}

int64_t nearest_divisor(int64_t n, int64_t m) {
  const int64_t below = largest_divisor(n, m);
  if (m >= n) return below;
  const int64_t end = 2 * m - below;  // as far above m
  for (int64_t above = m; above < end; ++above) {
    if (n % above == 0) return above;
  }
  return below;
}

std::string nearest_multiples(int64_t n, int64_t of, int64_t at_most) {
  const int64_t below = n / of * of, above = below + of;
  if (below == 0) return fmt::format("is {}", above);
  return above > at_most ? fmt::format("is {}", below) : fmt::format("are {} and {}", below, above);
}

}  // namespace moebius
