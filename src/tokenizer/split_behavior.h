// Turns matches and the text between them into pieces.
#pragma once

#include <cstddef>

#include "tokenizer/pre_tokenizer.h"

namespace moebius {

// Takes spans in order and calls emit(begin, end) for each piece. finish() emits the last one.
template <class Emit>
class SpanMerger {
 public:
  SpanMerger(SplitBehavior behavior, Emit emit) : behavior_(behavior), emit_(emit) {}

  void add(size_t begin, size_t end, bool is_match) {
    if (behavior_ == SplitBehavior::isolated || (behavior_ == SplitBehavior::removed && !is_match))
      return emit_(begin, end);
    if (behavior_ == SplitBehavior::removed) return;
    if (begin_ < end_ && joins(is_match)) {
      end_ = end;
    } else {
      finish();
      begin_ = begin;
      end_ = end;
    }
    was_match_ = is_match;
  }

  void finish() {
    if (begin_ < end_) emit_(begin_, end_);
    begin_ = end_;
  }

 private:
  bool joins(bool is_match) const {
    switch (behavior_) {
      case SplitBehavior::merged_with_previous:
        return is_match && !was_match_;
      case SplitBehavior::merged_with_next:
        return was_match_ && !is_match;
      default:
        return was_match_ == is_match;
    }
  }

  SplitBehavior behavior_;
  Emit emit_;
  size_t begin_ = 0, end_ = 0;  // the piece that may still grow
  bool was_match_ = false;
};

}  // namespace moebius
