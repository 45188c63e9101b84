// Serves the page of a run on 127.0.0.1 while the run continues.
#pragma once

#include <memory>
#include <string>

#include "report/run_folder.h"

namespace moebius {

struct WatchOptions {
  int port = 0;          // 0: a free one
  bool metrics = false;  // whether /metrics is served
};

// It answers GET and HEAD of three paths: / is the page, /data what changes on it, and /metrics the newest values for
// Prometheus. Everything else is refused.
// A request must name this machine in its header Host: 127.0.0.1, localhost or [::1], with any port, so that a port
// may be forwarded. A page of another host that points its name here (DNS rebinding) gets nothing.
class WatchServer {
 public:
  // Throws Error{input} if the path is no run's folder, Error{io} if the port is in use or refused.
  WatchServer(const std::string& run, const WatchOptions& options);
  ~WatchServer();  // ends the threads

  int port() const;
  std::string address() const;  // "http://127.0.0.1:7007/"

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace moebius
