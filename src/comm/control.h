// What the ranks of a run tell each other beside training: choices, outcomes and texts, in host memory. Every rank
// makes the same calls in the same order; a world of one rank answers itself.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/transport/transport.h"

namespace moebius {

class Control {
 public:
  // Makes a group of all ranks: every rank of the world makes its own. The transport outlives it.
  explicit Control(Transport& transport);

  int rank() const { return rank_; }
  int size() const { return size_; }
  bool is_root() const { return rank_ == 0; }

  std::vector<std::string> gather(const std::string& mine);  // by rank, the same on every rank
  std::string from_root(const std::string& text);            // rank 0's, whatever the others pass
  int64_t sum(int64_t mine);                                 // over the ranks
  int64_t max(int64_t mine);
  void barrier();

  // Runs body, which must not communicate, on every rank. When it throws Error on some, every rank throws that of the
  // lowest of them, with its number in front unless all ranks say the same: then the ranks go on, or end, as one.
  void together(const std::function<void()>& body);
  // The same for what rank 0 alone does.
  void on_root(const std::function<void()>& body);

 private:
  std::vector<int64_t> gather(int64_t mine);

  ThreadPool pool_{1};
  Stream s_{DeviceKind::cpu, pool_};
  int rank_, size_;
  std::unique_ptr<Group> group_;
};

// What a rank says of the run that it is about to join, in lines.
struct Claim {
  std::string what;  // "the recipe"
  std::string text;
};
// Error{usage} on every rank when they differ: names who stands against whom and the first line that differs.
void check_agree(Control& control, const Claim& claim);

}  // namespace moebius
