// The flight recorder keeps the last collectives of one rank for the report of a hung run.
// It also keeps older ones that have not ended: a pipeline's receives and the gathers of weights
// begin long before they are waited for.
// The rank's thread writes, any thread may read:
// a waiting rank reports the last collectives of the rank that it waits for.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

#include "core/dtype.h"

namespace moebius {

struct CollectiveRecord {
  const char* op = "";  // "all_reduce_sum"
  std::string group;    // "dp"
  int64_t number = 0;   // number of this call in its group, from 0: equal on every rank that joined it
  DType dtype = DType::u8;
  int64_t numel = 0;  // elements that this rank contributed
  bool ended = false;
};

std::string to_string(const CollectiveRecord& r);  // "all_reduce_sum 17 of group dp (f32 x 4096)"

class CollectiveFlightRecorder {
 public:
  static constexpr int64_t kSize = 64;

  int64_t begin(CollectiveRecord record);  // returns the record's number
  void end(int64_t number);
  CollectiveRecord last() const;              // a record with op "start" if there was no collective yet
  CollectiveRecord at(int64_t number) const;  // REQUIRES: one of the last kSize, or not ended
  // Returns one line for each record, the oldest first: those that have not ended, and the last max_records.
  // Returns "  none\n" when there was no collective yet.
  std::string text(int64_t max_records = kSize) const;

 private:
  mutable std::mutex mutex_;
  std::array<CollectiveRecord, kSize> records_;
  std::map<int64_t, CollectiveRecord> open_;  // records that were overwritten in records_ before they ended
  int64_t num_begun_ = 0;
};

}  // namespace moebius
