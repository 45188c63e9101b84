// XXH3-128 of bytes: tells damaged from whole, does not resist an adversary. The digest is the library's canonical one.
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

std::string to_hex(Hash128 hash);  // 32 lower-case digits, high half first: what `xxh128sum` prints

Hash128 hash_bytes(const void* data, int64_t bytes);

// The same digest over bytes that come in pieces.
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
