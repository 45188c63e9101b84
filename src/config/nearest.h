// "Did you mean": the known key nearest to an unknown one.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace moebius {

// Returns the number of insertions, deletions and substitutions that turn a into b (Levenshtein 1966).
int edit_distance(std::string_view a, std::string_view b);

// Returns the candidate with the smallest edit distance to name, the first of equals. A candidate that has
// the same last dotted part counts as distance 1: the key is right, its section is not. REQUIRES:
// candidates not empty.
std::string nearest(std::string_view name, const std::vector<std::string>& candidates);

// Returns the nearest candidate if name is probably a typing error for it; else empty. The sections and the last dotted
// parts differ by at most one edit for every three letters of the longer one. For a name without a dot, that holds for
// a section or for a last part. A candidate of another section counts if it has the same last part, of more
// than four letters.
std::string nearest_if_near(std::string_view name, const std::vector<std::string>& candidates);

}  // namespace moebius
