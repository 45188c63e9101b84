// Control messages between the ranks of a run, outside of training: decisions, errors and strings, in host memory.
// Every rank makes the same calls in the same order. With one rank each call returns at once.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/transport/transport.h"

namespace moebius {

class Control {
 public:
  // Makes a group of all ranks; every rank of the world makes its own Control.
  // The transport must outlive it.
  explicit Control(Transport& transport);

  int rank() const { return rank_; }
  int size() const { return size_; }
  bool is_root() const { return rank_ == 0; }

  std::vector<std::string> gather(const std::string& mine);  // returns the strings of all ranks, on every rank
  std::string from_root(const std::string& text);            // returns rank 0's string on every rank
  int64_t sum(int64_t mine);                                 // returns the sum over the ranks
  int64_t max(int64_t mine);                                 // returns the maximum over the ranks
  void barrier();                                            // returns when every rank has called it
  // While the result exists, timeouts are longer than in a step.
  [[nodiscard]] DefaultTimeout::BetweenSteps between_steps() { return transport_.default_timeout().between_steps(); }

  // Runs body, which must not communicate, on every rank, and makes its failure collective: if it throws Error on some
  // ranks, every rank throws the error of the lowest one. The message begins with that rank's number, unless all ranks
  // throw the same error.
  void together(const std::function<void()>& body);
  // The same for a body that only rank 0 runs.
  void on_root(const std::function<void()>& body);

 private:
  std::vector<int64_t> gather(int64_t mine);

  Transport& transport_;
  ThreadPool pool_{1};
  Stream s_{DeviceKind::cpu, pool_};
  int rank_, size_;
  std::unique_ptr<Group> group_;
};

// A string that must be equal on all ranks of a run, such as the resolved recipe.
struct Claim {
  std::string what;  // "the recipe", for messages
  std::string text;
};
// Throws Error{usage} on every rank when the claims differ.
// The message lists which ranks disagree and the first line that differs.
void check_agree(Control& control, const Claim& claim);

}  // namespace moebius
