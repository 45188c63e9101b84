// The times of parts, which many layouts of a search share.
#pragma once

#include <array>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "plan/work_time.h"

namespace moebius {

// Keeps what part_time() returns. Threads may share it. REQUIRES: the machine, the assumptions and the keys of the run
// that a search does not choose are the same in all calls.
class PartTimes {
 public:
  const PartTime& of(const TimeContext& c, const PartWork& part, bool is_moe, bool is_layer);

 private:
  // The inputs of part_time() besides the part, which stands for all that its own key names (plan/cost/part_key.h).
  using Key = std::array<int64_t, 20>;
  struct Hash {
    size_t operator()(const Key& key) const;
  };
  static Key key_of(const TimeContext& c, const PartWork& part, bool is_moe, bool is_layer);

  std::mutex mutex_;  // protects times_; it is not held while a time is computed
  std::unordered_map<Key, std::unique_ptr<const PartTime>, Hash> times_;
};

}  // namespace moebius
