#include "report/watch_server.h"

#include <fmt/format.h>
#include <httplib.h>

#include <chrono>
#include <optional>
#include <string_view>
#include <utility>

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

// The state of the run that requests see. One thread uses it.
class WatchedRun {
 public:
  explicit WatchedRun(const std::string& path) : folder_(path) { folder_.poll(); }

  // Calls answer(run, version) with the newest state.
  template <class Answer>
  void with_newest(Answer&& answer) {
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
  RunFolder folder_;
  std::chrono::steady_clock::time_point looked_ = std::chrono::steady_clock::now();
  int64_t changes_ = 0;
};

// Parses requests and finds their handlers; it has no socket of its own.
class RequestHandler : public httplib::Server {
 public:
  std::string answer_to(const std::string& request) {
    BytesStream stream(request);
    bool closed = false;
    process_request(stream, /*close_connection=*/true, closed, nullptr);
    return stream.take_answer();
  }

 private:
  class BytesStream : public httplib::Stream {
   public:
    explicit BytesStream(const std::string& request) : left_(request) {}
    std::string take_answer() { return std::move(answer_); }
    bool is_readable() const override { return true; }
    bool is_writable() const override { return true; }
    ssize_t read(char* to, size_t size) override {
      const size_t count = left_.copy(to, size);
      left_.remove_prefix(count);
      return static_cast<ssize_t>(count);
    }
    ssize_t write(const char* from, size_t size) override {
      answer_.append(from, size);
      return static_cast<ssize_t>(size);
    }
    void get_remote_ip_and_port(std::string&, int&) const override {}
    void get_local_ip_and_port(std::string&, int&) const override {}
    socket_t socket() const override { return INVALID_SOCKET; }

   private:
    std::string_view left_;
    std::string answer_;
  };
};

}  // namespace

class WatchServer::Impl {
 public:
  Impl(const std::string& path, const WatchOptions& options) : run_(path), has_metrics_(options.metrics) {
    requests_.set_payload_max_length(1024);
    requests_.set_pre_routing_handler([this](const auto& request, auto& answer) { return admit(request, answer); });
    // The answer to an error repeats no text of the request.
    requests_.set_exception_handler([](const auto&, auto& answer, std::exception_ptr) {
      answer.status = 500;
      answer.set_content("the run's folder could not be read\n", "text/plain");
    });
    requests_.Get("/", [this](const auto&, auto& answer) { send_page(answer); });
    requests_.Get("/data", [this](const auto& request, auto& answer) { send_data(request, answer); });
    requests_.Get("/metrics", [this](const auto&, auto& answer) { send_metrics(answer); });
    connections_.emplace(
        options.port, [this](const std::string& request) { return requests_.answer_to(request); }, options.limits);
  }
  int port() const { return connections_->port(); }

 private:
  using Request = httplib::Request;
  using Response = httplib::Response;

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
  RequestHandler requests_;
  std::optional<HttpConnections> connections_;  // its thread uses all of the above
};

WatchServer::WatchServer(const std::string& run, const WatchOptions& options)
    : impl_(std::make_unique<Impl>(run, options)) {}
WatchServer::~WatchServer() = default;
int WatchServer::port() const { return impl_->port(); }
std::string WatchServer::address() const { return fmt::format("http://127.0.0.1:{}/", port()); }

}  // namespace moebius
