// A direct-mapped cache of the ids of words. A new word replaces the word in its slot. An entry is as large as
// a cache line.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace moebius {

class WordCache {
 public:
  // Appends the word's ids if the cache has the word, and returns whether it does.
  bool append(std::string_view word, std::vector<int32_t>* ids) const;
  // Stores the ids of a word, unless it has more bytes or ids than fit in an entry.
  void put(std::string_view word, std::span<const int32_t> ids);

 private:
  // The table has 8 MiB. Entries of frequent words stay in the fast caches, and a smaller table
  // would lose many of the rare words of English.
  static constexpr size_t kEntries = size_t{1} << 17;
  static constexpr size_t kMaxBytes = 30, kMaxIds = 8;
  struct alignas(64) Entry {
    uint8_t num_bytes = 0, num_ids = 0;
    char bytes[kMaxBytes];
    int32_t ids[kMaxIds];
  };

  static size_t place(std::string_view word);

  std::vector<Entry> entries_ = std::vector<Entry>(kEntries);
};

}  // namespace moebius
