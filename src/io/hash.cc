#include "io/hash.h"

#include <fmt/core.h>
#include <xxhash.h>

namespace moebius {

void Hasher::Free::operator()(XXH3_state_s* state) const { XXH3_freeState(state); }

Hasher::Hasher() : state_(XXH3_createState()) { XXH3_128bits_reset(state_.get()); }

void Hasher::update(const void* data, int64_t bytes) { XXH3_128bits_update(state_.get(), data, bytes); }

Hash128 Hasher::digest() const {
  const XXH128_hash_t h = XXH3_128bits_digest(state_.get());
  return {.high = h.high64, .low = h.low64};
}

Hash128 hash_bytes(const void* data, int64_t bytes) {
  const XXH128_hash_t h = XXH3_128bits(data, bytes);
  return {.high = h.high64, .low = h.low64};
}

std::string to_hex(Hash128 hash) { return fmt::format("{:016x}{:016x}", hash.high, hash.low); }

}  // namespace moebius
