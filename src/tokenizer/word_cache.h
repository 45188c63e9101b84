// The ids of words seen before. A word has one place, where it displaces another; entry and cache line are one.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace moebius {

class WordCache {
 public:
  // Whether the word is here; then its ids are appended.
  bool append(std::string_view word, std::vector<int32_t>* ids) const;
  // Longer words and those of more ids than an entry holds are let go.
  void put(std::string_view word, std::span<const int32_t> ids);

 private:
  // 8 MiB: frequent words keep their lines near the core, and English has more rare ones than a smaller table holds.
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
