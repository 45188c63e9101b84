// XXH3-128 of bytes. It detects corruption, but does not resist an adversary.
// The digest is XXH3's canonical one.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

struct XXH3_state_s;  // the library's running state

namespace moebius {

struct Hash128 {
  uint64_t high = 0, low = 0;
  bool operator==(const Hash128&) const = default;
};

std::string to_hex(Hash128 hash);  // 32 lower-case digits, high half first, as `xxh128sum` prints

Hash128 hash_bytes(const void* data, int64_t bytes);

// Computes the same digest over bytes that arrive in pieces.
class Hasher {
 public:
  Hasher();
  void update(const void* data, int64_t bytes);
  Hash128 digest() const;

 private:
  struct Free {
    void operator()(XXH3_state_s* state) const;
  };
  std::unique_ptr<XXH3_state_s, Free> state_;
};

}  // namespace moebius
