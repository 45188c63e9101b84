// A hash table from pairs of token ids to the tokens they merge into. It uses linear probing, is
// written once, and then only read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace moebius {

struct Merged {
  uint32_t rank;
  int32_t id;
};

class PairTable {
 public:
  PairTable() : PairTable(0) {}
  // Allocates a table for `pairs` pairs, which is then at most half full.
  explicit PairTable(size_t pairs) {
    size_t slots = 2;
    while (slots < 2 * pairs) slots *= 2;
    slots_.resize(slots);
  }

  // Sets a pair; a later value replaces an earlier one. REQUIRES: ids >= 0, and at most `pairs`
  // different pairs.
  void set(int32_t left, int32_t right, Merged merged) { slots_[place(key(left, right))] = {key(left, right), merged}; }

  // Returns null when the pair does not merge.
  const Merged* find(int32_t left, int32_t right) const {
    const Slot& slot = slots_[place(key(left, right))];
    return slot.key == kEmpty ? nullptr : &slot.merged;
  }

 private:
  static constexpr uint64_t kEmpty = ~uint64_t{0};
  struct Slot {
    uint64_t key = kEmpty;
    Merged merged{};
  };

  static uint64_t key(int32_t left, int32_t right) {
    return uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
  }

  // Returns the slot that has the key, or the free slot where it would be inserted.
  size_t place(uint64_t key) const {
    const size_t mask = slots_.size() - 1;
    const uint64_t mixed = key * 0x9e3779b97f4a7c15u;
    size_t at = (mixed ^ mixed >> 32) & mask;
    while (slots_[at].key != key && slots_[at].key != kEmpty) at = (at + 1) & mask;
    return at;
  }

  std::vector<Slot> slots_;
};

}  // namespace moebius
