// Sockets of TCP: opened and closed, found by name, and whole messages over them until a point in time. Errors are
// Error{distributed}, say who failed to do what, and carry the system's reason.
#pragma once

#include <chrono>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace moebius {

using Deadline = std::chrono::steady_clock::time_point;
Deadline deadline_in(double seconds);
int milliseconds_until(Deadline deadline);  // 0 when it has passed

struct HostPort {
  std::string host;  // name or number
  int port = 0;
};
std::string to_string(const HostPort& a);  // "node1:29500"

// Owns a descriptor.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int descriptor) : descriptor_(descriptor) {}
  ~Socket();
  Socket(Socket&& other) noexcept { std::swap(descriptor_, other.descriptor_); }
  Socket& operator=(Socket&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  bool is_open() const { return descriptor_ >= 0; }
  int descriptor() const { return descriptor_; }
  void close() { *this = Socket(); }

 private:
  int descriptor_ = -1;
};

// "localhost" and the numbers of a machine's own loopback: what listens there is reached from this machine alone.
bool is_loopback(const std::string& host);

// Listens at a port, 0: one that is free, on every address of this machine or on the loopback alone.
Socket listen_at(int port, bool loopback_only);
int port_of(const Socket& listener);
// The next connection, or none when nobody came until then.
Socket accept_until(const Socket& listener, Deadline deadline);
// Tries again until then: names may not be known yet, nor anybody listen.
Socket connect_until(const HostPort& to, Deadline deadline);
// By number: whom a connection leads to, and from where.
std::string peer_host(const Socket& connection);
std::string own_host(const Socket& connection);
// By number: where other machines may reach this one, those of IPv4 first.
std::vector<std::string> own_hosts();

// All of it, or Error{distributed}: the other end is gone, or the time is over. what: "the table of ranks".
void write_all(const Socket& s, std::span<const std::byte> bytes, Deadline deadline, const char* what);
void read_all(const Socket& s, std::span<std::byte> bytes, Deadline deadline, const char* what);

template <class T>
void write_value(const Socket& s, const T& value, Deadline deadline, const char* what) {
  write_all(s, std::as_bytes(std::span(&value, 1)), deadline, what);
}
template <class T>
T read_value(const Socket& s, Deadline deadline, const char* what) {
  T value{};
  read_all(s, std::as_writable_bytes(std::span(&value, 1)), deadline, what);
  return value;
}
// A text after its length in 8 bytes. Error{distributed} for one of more than `most` bytes.
void write_text(const Socket& s, const std::string& text, Deadline deadline, const char* what);
std::string read_text(const Socket& s, Deadline deadline, const char* what, int64_t most = 1 << 20);

}  // namespace moebius
