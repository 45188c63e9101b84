// The key-value store that torchrun keeps at MASTER_ADDR:MASTER_PORT for the processes that it starts: read and written
// as PyTorch's own client does (torch/csrc/distributed/c10d/TCPStore.cpp, the store of libuv).
#pragma once

#include "comm/transport/socket.h"

namespace moebius {

class TorchStore {
 public:
  TorchStore(const HostPort& at, Deadline deadline);  // Error{distributed} when nobody listens there in time

  void set(const std::string& key, const std::string& value);
  std::string wait_for(const std::string& key);  // Error{distributed} when nobody sets it in time
  const Socket& socket() const { return socket_; }

 private:
  Deadline deadline_;
  Socket socket_;
};

}  // namespace moebius
