#include "comm/bounded_call.h"

#include <chrono>
#include <future>
#include <thread>

#include "core/error.h"

namespace moebius {

void call_bounded(Transport& world, BoundedCall call) {
  std::packaged_task<void()> task(std::move(call.body));
  std::future<void> ended = task.get_future();  // unlike that of std::async, it waits for nobody when it goes
  std::thread(std::move(task)).detach();
  const WorldOptions& options = world.options();
  const auto begin = std::chrono::steady_clock::now();
  while (ended.wait_for(std::chrono::microseconds(200)) != std::future_status::ready) {
    world.check();
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - begin;
    const std::string name = name_of_rank(options, world.rank());
    MOEBIUS_CHECK(distributed, waited.count() <= options.timeout_s,
                  "{}: {} has waited for {} s for {}, of which one does not join; what is that rank doing?\nlast "
                  "collectives that {} was in:\n{}",
                  call.what, name, options.timeout_s, names_of_ranks(options, call.with), name, world.ring().text());
  }
  ended.get();
}

}  // namespace moebius
