// torchrun's store in a test.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/transport/socket.h"
#include "core/error.h"

namespace moebius {

// torchrun's store, as far as Moebius uses it.
class TestStore {
 public:
  explicit TestStore(bool loopback_only = true) : listener_(listen_at(0, loopback_only)) {}
  ~TestStore() { stop_ = true; }
  int port() const { return port_of(listener_); }
  std::string entry(const std::string& key) {
    const std::lock_guard lock(mutex_);
    return entries_[key];
  }

 private:
  void serve() {
    while (!stop_) {
      Socket s = accept_until(listener_, deadline_in(0.05));
      if (!s.is_open()) continue;
      clients_.emplace_back([this, s = std::move(s)] {
        try {
          while (true) answer(s);
        } catch (const Error&) {  // the client has left
        }
      });
    }
  }
  void answer(const Socket& s) {
    const Deadline deadline = deadline_in(20);
    const auto query = read_value<unsigned char>(s, deadline, "a query");
    const uint32_t magic = query == 0 ? read_value<uint32_t>(s, deadline, "magic") : 0x3C85F7CE;
    EXPECT_EQ(magic, 0x3C85F7CE);
    if (query == 0) return;
    const uint64_t keys = query == 6 ? read_value<uint64_t>(s, deadline, "keys") : 1;
    EXPECT_EQ(keys, 1);
    const std::string key = read_text(s, deadline, "a key");
    if (query == 1) {
      const std::string value = read_text(s, deadline, "a value");
      const std::lock_guard lock(mutex_);
      entries_[key] = value;
    }
    while (query == 6 && !has(key)) std::this_thread::yield();
    if (query == 6) write_value<unsigned char>(s, 0, deadline, "an answer");
    if (query == 3) write_text(s, entry(key), deadline, "an answer");
  }
  bool has(const std::string& key) { return !entry(key).empty(); }

  Socket listener_;
  std::mutex mutex_;
  std::map<std::string, std::string> entries_;
  std::atomic<bool> stop_ = false;
  std::vector<std::jthread> clients_;
  std::jthread server_{[this] { serve(); }};
};

}  // namespace moebius
