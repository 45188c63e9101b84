#include "comm/transport/job_secret.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include "core/error.h"

namespace moebius {
namespace {

unsigned char* bytes_of(std::byte* p) { return reinterpret_cast<unsigned char*>(p); }
const unsigned char* bytes_of(const std::byte* p) { return reinterpret_cast<const unsigned char*>(p); }

}  // namespace

Nonce draw_nonce() {
  Nonce nonce;
  MOEBIUS_CHECK(distributed, RAND_bytes(bytes_of(nonce.data()), static_cast<int>(nonce.size())) == 1,
                "tcp: the system gives no random bytes, which connections between ranks need");
  return nonce;
}

std::string draw_secret() {
  std::string secret;
  for (const std::byte b : draw_nonce()) secret += fmt::format("{:02x}", static_cast<unsigned>(b));
  return secret;
}

Proof prove(const std::string& secret, std::span<const std::byte> text) {
  Proof proof{};
  unsigned size = 0;
  const auto* made = HMAC(EVP_sha256(), secret.data(), static_cast<int>(secret.size()), bytes_of(text.data()),
                          text.size(), bytes_of(proof.data()), &size);
  MOEBIUS_ASSERT(made != nullptr && size == proof.size());
  return proof;
}

bool is_same(const Proof& a, const Proof& b) { return CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0; }

}  // namespace moebius
