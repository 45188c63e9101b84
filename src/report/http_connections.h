// Connections of HTTP clients to a port of 127.0.0.1, which one thread serves without waiting for any of them.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

namespace moebius {

// A client that sends its request byte by byte, or takes its answer slowly, delays no other client.
// Each connection carries one request, and is closed after the answer.
class HttpConnections {
 public:
  struct Limits {
    std::chrono::milliseconds request{10'000};  // from the connection to the last byte of the request's header
    std::chrono::milliseconds answer{60'000};   // from there until the client has all of the answer
    size_t connections = 256;                   // a further one replaces the oldest that has sent no whole request
    size_t waiting_bytes = size_t{64} << 20;    // of all answers that clients have not taken yet; above it the oldest
                                                // connection with an answer is closed
  };
  // answer(request) returns the bytes of an answer to these bytes: a request line and a header, or what came before
  // they grew too long. The thread calls it for one request at a time. An empty answer closes the connection.
  using Answer = std::function<std::string(const std::string& request)>;

  // port: 0 for a free one. Throws Error{io} if the port is in use or refused.
  HttpConnections(int port, Answer answer, const Limits& limits);
  ~HttpConnections();  // ends the thread, and closes all connections

  int port() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace moebius
