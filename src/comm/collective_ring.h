// The last collectives of one rank, kept for the report of a run that stands still. Written by the rank's thread, read
// by any: a rank that waits in vain shows what the rank that it waits for did last.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <string>

#include "core/dtype.h"

namespace moebius {

struct CollectiveRecord {
  const char* op = "";  // "all_reduce_sum"
  std::string group;    // "dp"
  int64_t number = 0;   // of this call in its group, from 0: the same on every rank that joined it
  DType dtype = DType::u8;
  int64_t numel = 0;  // of what this rank put in
  bool ended = false;
};

std::string to_string(const CollectiveRecord& r);  // "all_reduce_sum 17 of group dp (f32 x 4096)"

class CollectiveRing {
 public:
  static constexpr int64_t kSize = 64;

  int64_t begin(CollectiveRecord record);  // returns its number in the ring
  void end(int64_t number);
  CollectiveRecord last() const;              // one without a name when there was none yet
  CollectiveRecord at(int64_t number) const;  // REQUIRES: one of the last kSize
  // One line each, the oldest first, at most `most` of them; "  none\n" when there was no collective yet.
  std::string text(int64_t most = kSize) const;

 private:
  mutable std::mutex mutex_;
  std::array<CollectiveRecord, kSize> records_;
  int64_t num_begun_ = 0;
};

}  // namespace moebius
