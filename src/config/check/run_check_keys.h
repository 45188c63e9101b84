// Parts of the messages about the keys of a recipe.
#pragma once

#include <cstdint>
#include <string>

#include "config/run_spec.h"

namespace moebius {

// Returns " [recipe.toml:12]", for the end of a message about a key.
std::string origin(const RunSpec& s, const std::string& key);

// Refuses a key that has no effect without another key. The default value passes, so that a
// resolved recipe, which holds every key, reads back.
void refuse_idle(const RunSpec& s, const char* key, const std::string& why);

// Returns the largest divisor of n that is at most at_most.
int64_t largest_divisor(int64_t n, int64_t at_most);

// Returns the divisor of n nearest to m, the smaller of two. REQUIRES: n and m are above 0.
int64_t nearest_divisor(int64_t n, int64_t m);

// Returns a string such as "are 996 and 1002", "is 996": the multiples of `of` nearest to n, from `of` to at_most.
std::string nearest_multiples(int64_t n, int64_t of, int64_t at_most);

}  // namespace moebius
