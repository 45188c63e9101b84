#include "device/side_copies.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <vector>

namespace moebius {
namespace {

class NoCopies final : public SideCopies {
 public:
  void to_host(Stream&, int, std::span<const Copy>) override {}
  void to_device(Stream&, int, std::span<const Copy>) override {}
  void wait_to_host(Stream&, int) override {}
  void wait_to_device(Stream&, int) override {}
};

// Each direction runs its copies in the order in which they were started, but only when a wait needs them. This shows
// missing waits in tests.
class LateCopies final : public SideCopies {
 public:
  void to_host(Stream&, int slot, std::span<const Copy> copies) override { leaving_.push_back(started(slot, copies)); }
  void to_device(Stream&, int slot, std::span<const Copy> copies) override {
    arriving_.push_back(started(slot, copies));
    arriving_.back().leave_first = last_of(leaving_, slot);
  }
  void wait_to_host(Stream&, int slot) override { leave(last_of(leaving_, slot)); }
  void wait_to_device(Stream&, int slot) override {
    for (int64_t number = last_of(arriving_, slot); !arriving_.empty() && arriving_.front().number <= number;) {
      leave(arriving_.front().leave_first);
      for (const Copy& c : arriving_.front().copies) std::memcpy(c.device, c.host, c.num_bytes);
      arriving_.pop_front();
    }
  }

 private:
  struct Started {
    int64_t number = 0;
    int slot = 0;
    std::vector<Copy> copies;
    int64_t leave_first = -1;  // the copies to the host up to this number come first
  };
  Started started(int slot, std::span<const Copy> copies) {
    return {.number = next_++, .slot = slot, .copies = {copies.begin(), copies.end()}};
  }
  // Returns the number of the slot's last copies that have not run; -1 if there are none.
  static int64_t last_of(const std::deque<Started>& queue, int slot) {
    const auto last = std::find_if(queue.rbegin(), queue.rend(), [&](const Started& c) { return c.slot == slot; });
    return last == queue.rend() ? -1 : last->number;
  }
  void leave(int64_t number) {
    for (; !leaving_.empty() && leaving_.front().number <= number; leaving_.pop_front())
      for (const Copy& c : leaving_.front().copies) std::memcpy(c.host, c.device, c.num_bytes);
  }

  int64_t next_ = 0;
  std::deque<Started> leaving_, arriving_;
};

}  // namespace

std::unique_ptr<SideCopies> SideCopies::make(const Stream& s) {
  if (s.device() == DeviceKind::cuda) return cuda::make_side_copies(s.accelerator());
  if (s.device() == DeviceKind::cpu) return std::make_unique<LateCopies>();
  return std::make_unique<NoCopies>();
}

}  // namespace moebius
