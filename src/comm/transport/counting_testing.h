// A transport that counts messages, for tests.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <utility>

#include "comm/transport/transport.h"

namespace moebius::testing {

// Passes messages on, and counts those that this rank sends and whose size in bytes `counts` accepts.
class CountingTransport final : public Transport {
 public:
  explicit CountingTransport(
      Transport& world, std::function<bool(int64_t)> counts = [](int64_t) { return true; })
      : world_(world), counts_(std::move(counts)) {}
  int rank() const override { return world_.rank(); }
  int size() const override { return world_.size(); }
  std::unique_ptr<Message> send(int to, int channel, const void* data, int64_t num_bytes) override {
    sent += counts_(num_bytes);
    return world_.send(to, channel, data, num_bytes);
  }
  std::unique_ptr<Message> recv(int from, int channel, void* data, int64_t num_bytes) override {
    return world_.recv(from, channel, data, num_bytes);
  }
  void wait(std::span<const std::unique_ptr<Message>> messages, int64_t record) override {
    world_.wait(messages, record);
  }
  int64_t sent = 0;

 private:
  Transport& world_;
  std::function<bool(int64_t)> counts_;
};

}  // namespace moebius::testing
