// A server on 127.0.0.1 that shows the page of a run while the run continues.
#pragma once

#include <memory>
#include <string>

#include "report/http_connections.h"
#include "report/run_folder.h"

namespace moebius {

struct WatchOptions {
  int port = 0;          // 0: a free one
  bool metrics = false;  // whether /metrics is served
  HttpConnections::Limits limits{};
};

// It serves GET and HEAD of three paths: / is the page, /data is the part of it that changes, and /metrics has the
// newest values for Prometheus. All other requests are refused.
// A request must name this machine in its header Host: 127.0.0.1, localhost or [::1], with any port, so that a port
// may be forwarded. So a page of another host whose name resolves to this machine (DNS rebinding) gets no data.
class WatchServer {
 public:
  // Throws Error{input} if the path is not the folder of a run, and Error{io} if the port is in use or refused.
  WatchServer(const std::string& run, const WatchOptions& options);
  ~WatchServer();  // ends the thread

  int port() const;
  std::string address() const;  // "http://127.0.0.1:7007/"

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace moebius
