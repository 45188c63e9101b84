#include "comm/liveness/bounded_call.h"

#include <chrono>
#include <future>
#include <thread>

#include "comm/liveness/stall_aware_deadline.h"
#include "core/error.h"

namespace moebius {

void call_bounded(Transport& world, BoundedCall call) {
  std::packaged_task<void()> task(std::move(call.body));
  std::future<void> ended = task.get_future();  // unlike that of std::async, its destructor does not wait
  std::thread(std::move(task)).detach();
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
  ended.get();
}

}  // namespace moebius
