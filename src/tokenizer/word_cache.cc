#include "tokenizer/word_cache.h"

#include <algorithm>
#include <cstring>

namespace moebius {

namespace {

template <class Word>
uint64_t load(const char* at) {
  Word word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

uint64_t mix(uint64_t hash, uint64_t word) {
  const auto product = static_cast<unsigned __int128>(hash ^ word) * 0x9e3779b97f4a7c15u;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

}  // namespace

// The last read overlaps the one before it where the length is not a multiple of 8, which does no
// harm to a hash.
size_t WordCache::place(std::string_view word) {
  const char* at = word.data();
  const size_t size = word.size();
  uint64_t hash = size + 0xff51afd7ed558ccdu;
  if (size >= 8) {
    for (size_t i = 0; i + 8 < size; i += 8) hash = mix(hash, load<uint64_t>(at + i));
    hash = mix(hash, load<uint64_t>(at + size - 8));
  } else if (size >= 4) {
    hash = mix(hash, load<uint32_t>(at) << 32 | load<uint32_t>(at + size - 4));
  } else if (size > 0) {
    hash = mix(hash, load<uint8_t>(at) << 16 | load<uint8_t>(at + size / 2) << 8 | load<uint8_t>(at + size - 1));
  }
  return mix(hash, hash >> 32) % kEntries;
}

bool WordCache::append(std::string_view word, std::vector<int32_t>* ids) const {
  if (word.size() > kMaxBytes) return false;
  const Entry& entry = entries_[place(word)];
  if (entry.num_bytes != word.size() || std::memcmp(entry.bytes, word.data(), word.size()) != 0) return false;
  ids->insert(ids->end(), entry.ids, entry.ids + entry.num_ids);
  return true;
}

void WordCache::put(std::string_view word, std::span<const int32_t> ids) {
  if (word.size() > kMaxBytes || ids.size() > kMaxIds) return;
  Entry& entry = entries_[place(word)];
  entry.num_bytes = static_cast<uint8_t>(word.size());
  entry.num_ids = static_cast<uint8_t>(ids.size());
  std::copy(word.begin(), word.end(), entry.bytes);
  std::copy(ids.begin(), ids.end(), entry.ids);
}

}  // namespace moebius
