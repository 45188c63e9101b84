#include "comm/liveness/bounded_call.h"

#include <chrono>
#include <functional>
#include <future>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "comm/liveness/stall_aware_deadline.h"
#include "core/error.h"
#include "core/start_thread.h"
#include "device/out_of_memory.h"

namespace moebius {

namespace {

using Failure = std::optional<std::pair<ErrorKind, std::string>>;

// Returns the text of an error of the body, not the exception. Either of two threads could destroy a shared exception,
// and the thread sanitizer reports this as a race, because the library that counts the references is not instrumented.
Failure failure_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const OutOfMemory&) {
    throw;
  } catch (const Error& e) {
    return std::pair(e.kind(), std::string(e.what()));
  }
  return {};
}

}  // namespace

void call_bounded(Transport& world, BoundedCall call) {
  std::packaged_task<Failure()> task([body = std::move(call.body)] { return failure_of(body); });
  std::future<Failure> ended = task.get_future();  // unlike that of std::async, its destructor does not wait
  start_thread([&] { return std::thread(std::move(task)); }).detach();
  const WorldOptions& options = world.options();
  const double timeout_s = world.timeout_s();
  StallAwareDeadline deadline(timeout_s);
  while (ended.wait_for(std::chrono::microseconds(200)) != std::future_status::ready) {
    world.check();
    const std::string name = name_of_rank(options, world.rank());
    MOEBIUS_CHECK(distributed, !deadline.is_over(),
                  "{}: {} has waited for {} s for {}, one of which has not joined; check what that rank does\nlast "
                  "collectives that {} was in:\n{}",
                  call.what, name, timeout_s, names_of_ranks(options, call.with), name, world.recorder().text());
  }
  if (const Failure failure = ended.get()) throw Error(failure->first, failure->second);
}

}  // namespace moebius
