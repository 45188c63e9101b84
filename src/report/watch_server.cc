#include "report/watch_server.h"

#include <fmt/format.h>
#include <httplib.h>

#include <chrono>
#include <mutex>
#include <thread>

#include "core/error.h"
#include "io/files.h"
#include "report/page.h"
#include "report/sinks.h"

namespace moebius {
namespace {

constexpr int kPeriodMs = 2000;
constexpr std::chrono::milliseconds kPollInterval{500};  // minimum time between two reads of the folder
constexpr const char* kHtml = "text/html; charset=utf-8";

double now_s() { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); }

// Returns whether a header Host names this machine.
bool is_own_host(std::string_view host) {
  const size_t colon = host.rfind(':');
  const bool has_port = colon != std::string_view::npos && host.find(']', colon) == std::string_view::npos;
  const std::string_view name = has_port ? host.substr(0, colon) : host;
  const std::string_view port = has_port ? host.substr(colon + 1) : "1";
  if (port.empty() || port.size() > 5 || port.find_first_not_of("0123456789") != std::string_view::npos) return false;
  return name == "127.0.0.1" || name == "localhost" || name == "[::1]";
}

// The state of the run that requests see, one at a time.
class WatchedRun {
 public:
  explicit WatchedRun(const std::string& path) : folder_(path) { folder_.poll(); }

  // Calls answer(run, version) with the newest state.
  template <class Answer>
  void with_newest(Answer&& answer) {
    const std::lock_guard lock(mutex_);
    const auto now = std::chrono::steady_clock::now();
    if (now - looked_ > kPollInterval) {
      looked_ = now;
      changes_ += folder_.poll();
    }
    const ShownRun run{
        .name = folder_.name(), .path = folder_.path(), .data = folder_.data(), .modified_s = folder_.modified_s()};
    // A run that stops is said to have stopped some time after its last line, so that the time counts too.
    answer(run, fmt::format("\"{}-{}\"", changes_, static_cast<int64_t>(now_s()) / 30));
  }

 private:
  std::mutex mutex_;
  RunFolder folder_;
  std::chrono::steady_clock::time_point looked_ = std::chrono::steady_clock::now();
  int64_t changes_ = 0;
};

}  // namespace

class WatchServer::Impl {
 public:
  Impl(const std::string& path, const WatchOptions& options) : run_(path), has_metrics_(options.metrics) {
    // A peer that sends nothing more keeps a thread for a second, so many of them delay a browser only by seconds.
    server_.new_task_queue = [] { return new httplib::ThreadPool(64); };
    server_.set_payload_max_length(1024);
    server_.set_read_timeout(1);
    server_.set_write_timeout(5);
    server_.set_keep_alive_timeout(1);
    // Without the library's SO_REUSEPORT, with which two servers would share a port.
    server_.set_socket_options([this](socket_t socket) {
      const int yes = 1;
      ::setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
      listener_ = socket;
    });
    server_.set_pre_routing_handler([this](const auto& request, auto& answer) { return admit(request, answer); });
    // The answer to an error repeats no text of the request.
    server_.set_exception_handler([](const auto&, auto& answer, std::exception_ptr) {
      answer.status = 500;
      answer.set_content("the run's folder could not be read\n", "text/plain");
    });
    server_.Get("/", [this](const auto&, auto& answer) { send_page(answer); });
    server_.Get("/data", [this](const auto& request, auto& answer) { send_data(request, answer); });
    server_.Get("/metrics", [this](const auto&, auto& answer) { send_metrics(answer); });
    listen_on(options.port);
  }
  ~Impl() {
    server_.stop();
    if (thread_.joinable()) thread_.join();
  }
  int port() const { return port_; }

 private:
  using Request = httplib::Request;
  using Response = httplib::Response;

  void listen_on(int port) {
    errno = 0;
    port_ = port == 0 ? server_.bind_to_any_port("127.0.0.1") : server_.bind_to_port("127.0.0.1", port) ? port : -1;
    MOEBIUS_CHECK(io, port_ > 0,
                  "watch: port {} of 127.0.0.1 cannot be had: {}; give another --port, or --port 0 for a free one",
                  port, errno_text(errno != 0 ? errno : EADDRINUSE));
    // The library's queue has room for 5 connections. A browser that finds it full tries again only after a second.
    // Where this call fails, the short queue remains.
    ::listen(listener_, SOMAXCONN);
    thread_ = std::thread([this] { server_.listen_after_bind(); });
    // The library's stop() does nothing before it listens, and the thread would then never end.
    while (!server_.is_running()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  httplib::Server::HandlerResponse admit(const Request& request, Response& answer) const {
    answer.set_header("X-Content-Type-Options", "nosniff");
    answer.set_header("Referrer-Policy", "no-referrer");
    answer.set_header("Cache-Control", "no-store");
    answer.set_header("X-Frame-Options", "DENY");
    answer.set_header("Cross-Origin-Resource-Policy", "same-origin");
    const auto refuse = [&](int status, const char* text) {
      answer.status = status;
      answer.set_content(text, "text/plain");
      return httplib::Server::HandlerResponse::Handled;
    };
    if (request.get_header_value_count("Host") != 1 || !is_own_host(request.get_header_value("Host")))
      return refuse(403, "this is served only to 127.0.0.1 and localhost\n");
    if (request.method != "GET" && request.method != "HEAD") return refuse(405, "only GET and HEAD\n");
    if (request.path == "/metrics" && !has_metrics_) return refuse(404, "moebius watch --metrics serves these\n");
    if (request.path != "/" && request.path != "/data" && request.path != "/metrics")
      return refuse(404, "there are /, /data and /metrics\n");
    return httplib::Server::HandlerResponse::Unhandled;
  }

  void send_page(Response& answer) {
    run_.with_newest([&](const ShownRun& run, const std::string& version) {
      const PageTime time{.now_s = now_s(), .period_ms = kPeriodMs, .version = version};
      answer.set_header("Content-Security-Policy", content_policy(time) + "; frame-ancestors 'none'");
      answer.set_content(page_of({run}, time), kHtml);
    });
  }
  void send_data(const Request& request, Response& answer) {
    run_.with_newest([&](const ShownRun& run, const std::string& version) {
      answer.set_header("ETag", version);
      if (request.get_header_value("If-None-Match") == version) {
        answer.status = 304;
        return;
      }
      answer.set_content(page_body_of({run}, {.now_s = now_s(), .period_ms = kPeriodMs, .version = version}), kHtml);
    });
  }
  void send_metrics(Response& answer) {
    run_.with_newest([&](const ShownRun& run, const std::string&) {
      answer.set_content(prometheus_text(run.name, run.data), "text/plain; version=0.0.4; charset=utf-8");
    });
  }

  WatchedRun run_;
  bool has_metrics_;
  httplib::Server server_;
  socket_t listener_ = INVALID_SOCKET;  // the server's; it closes it
  std::thread thread_;
  int port_ = 0;
};

WatchServer::WatchServer(const std::string& run, const WatchOptions& options)
    : impl_(std::make_unique<Impl>(run, options)) {}
WatchServer::~WatchServer() = default;
int WatchServer::port() const { return impl_->port(); }
std::string WatchServer::address() const { return fmt::format("http://127.0.0.1:{}/", port()); }

}  // namespace moebius
