// TCP sockets: opening and closing, names, and whole messages with a deadline.
// Errors are Error{distributed}; they say who failed to do what, with the system's reason.
#pragma once

#include <chrono>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace moebius {

using Deadline = std::chrono::steady_clock::time_point;
Deadline deadline_in(double seconds);
int milliseconds_until(Deadline deadline);  // 0 when the deadline has passed

struct HostPort {
  std::string host;  // a host name or a numeric IP address
  int port = 0;
};
std::string to_string(const HostPort& a);  // "node1:29500"

// Owns its descriptor.
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

// Returns whether the host is "localhost" or a loopback address:
// only this machine can reach a listener there.
bool is_loopback(const std::string& host);

// Listens at a port, on every address of this machine or on the loopback only. Port 0 is
// any free port.
Socket listen_at(int port, bool loopback_only);
int port_of(const Socket& listener);
// Returns the next connection, or a closed socket if none arrives before the deadline.
Socket accept_until(const Socket& listener, Deadline deadline);
// Retries until the deadline: a name may not resolve yet, and a listener may not have started. name_lookup.h has more.
Socket connect_until(const HostPort& to, Deadline deadline);
// Sets the options of every socket here: its calls do not block, and small messages are sent at once.
void prepare_socket(const Socket& s);
int connect_error(const Socket& s);  // an errno; 0: connected. A connection to itself is ECONNREFUSED.
// Appends to `received` the bytes that have arrived, up to `size` in all, and does not wait.
// Returns whether all have arrived. Throws Error{distributed}, as read_all does, when the other end is gone.
bool read_available(const Socket& s, std::vector<std::byte>& received, size_t size, const char* what);
// Returns false if nothing arrives before the deadline.
bool wait_readable(const Socket& s, Deadline deadline);
bool wait_writable(const Socket& s, Deadline deadline);
// Return the numeric IP addresses of a connection's two ends.
std::string peer_host(const Socket& connection);
std::string own_host(const Socket& connection);
// Returns the numeric IP addresses at which other machines may reach this one, IPv4
// first.
std::vector<std::string> own_hosts();

// Transfer all bytes, or throw Error{distributed} when the peer is gone or the deadline has
// passed. what: names the bytes in the message, "the table of ranks".
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
// Transfer a string, preceded by its length in 8 bytes. Throw Error{distributed} for a string
// longer than max_bytes.
void write_text(const Socket& s, const std::string& text, Deadline deadline, const char* what);
std::string read_text(const Socket& s, Deadline deadline, const char* what, int64_t max_bytes = 1 << 20);

}  // namespace moebius
