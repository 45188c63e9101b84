// The key-value store that torchrun keeps at MASTER_ADDR:MASTER_PORT for the processes that it
// starts. It is read and written as PyTorch's own client does
// (torch/csrc/distributed/c10d/TCPStore.cpp, the libuv store).
#pragma once

#include "comm/transport/socket.h"

namespace moebius {

class TorchStore {
 public:
  TorchStore(const HostPort& at, Deadline deadline);  // throws Error{distributed} when no store listens there in time

  void set(const std::string& key, const std::string& value);
  std::string wait_for(const std::string& key);  // throws Error{distributed} when the key is not set in time
  const Socket& socket() const { return socket_; }

 private:
  Deadline deadline_;
  Socket socket_;
};

}  // namespace moebius
