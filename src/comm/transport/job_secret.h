// The secret of a job, and the proof that a connection's other end knows it.
// A proof is an HMAC-SHA256 (RFC 2104) of what both ends have sent, which includes a number that
// the other end drew for this connection. So the secret is never sent, and a proof that was
// overheard is of no use on another connection.
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <string>

namespace moebius {

using Proof = std::array<std::byte, 32>;
using Nonce = std::array<std::byte, 32>;  // drawn for one connection

// A shorter secret could be found by brute force, since the accepting end sends its proof first.
inline constexpr int kShortestSecret = 16;

std::string draw_secret();  // 64 hexadecimal digits; Error{distributed} when the system has no random bytes
Nonce draw_nonce();

Proof prove(const std::string& secret, std::span<const std::byte> text);
bool is_same(const Proof& a, const Proof& b);  // constant time

}  // namespace moebius
