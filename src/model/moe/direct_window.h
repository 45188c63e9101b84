// The window of the dispatchers direct and two_level: memory of this rank that other ranks write to. All MoE layers of
// a model share it. It is a part of Life::comm, and has the same layout on all ranks.
//
// direct (model/moe/dispatchers/dispatcher_direct.h): all ranks of etp x ep write to it. With T tokens per rank, W =
// ETP EP ranks, J = min(K, EP), and L = min(K, E/EP), the window of a rank has
//   counts        [W, EP]    i32  rows that each rank sends to each ep rank
//   routes        [W T, 2L]  i32  experts here and weights of the tokens that arrive
//   tokens        [W T, D]        x of the tokens that arrive
//   grads         [W T, D]        dy of the tokens that arrive; in training only
//   back          [T J ETP, D]    sums that return for this rank's tokens
//   back_weights  [T J ETP, L] f32  derivatives w.r.t. their weights; in training only
// These sizes suffice for any routing: a token is sent to a rank at most once, and all W T tokens may choose
// its experts.
//
// two_level (model/moe/dispatchers/dispatcher_two_level.h): the ranks of a node write to it. In J and in the columns of
// counts, EP is the number of ep ranks of the node. Each array has a section for each node, for the tokens of that
// node. So there are T J ETP rows of sums for each of the nodes. The other arrays have the rows of direct.
#pragma once

#include <functional>
#include <memory>
#include <optional>

#include "comm/mesh.h"
#include "comm/peer_window.h"
#include "config/dispatcher_choice.h"
#include "memory/plan.h"

namespace moebius {

struct DirectSizes {
  int64_t max_tokens = 1, num_experts = 1, top_k = 1, width = 1;  // T, E, K, D
  DType dtype = DType::f32;
  bool training = true;
  bool two_level = false;  // the window of a node's ranks. REQUIRES: mesh.shape().nodes_of_experts() > 1
};

// Returns whether the ranks of etp x ep can write to each other's memory; if not, whether the ranks of each node can.
// bytes_of: the memory that this rank shares with a dispatcher, direct or two_level; null tests with little memory.
// All ranks of the world call it together, and get the same result.
PeerReach peer_reach(Stream& s, const Mesh& mesh, const std::function<int64_t(DispatcherKind)>& bytes_of = {});

class DirectWindow {
 public:
  // Declares the window in the plan, as a part of Life::comm. The plan and the mesh must outlive it, and it must live
  // until bind().
  DirectWindow(MemoryPlan& plan, const Mesh& mesh, const DirectSizes& sizes);
  DirectWindow(const DirectWindow&) = delete;

  Group& ranks() const { return ranks_; }
  // The place of an array in the windows of all ranks.
  struct Array {
    int64_t offset = 0;  // bytes from the beginning of a window
    Shape shape{0};
    DType dtype = DType::i32;
  };
  const Array& counts() const { return counts_; }
  const Array& routes() const { return routes_; }
  const Array& tokens() const { return tokens_; }
  const Array& grads() const { return grads_; }
  const Array& back() const { return back_; }
  const Array& back_weights() const { return back_weights_; }
  Tensor here(const Array& array) const;  // the array in this rank's window

  // Connects the ranks at the first call; later calls do nothing. On the null device nothing happens. Throws the errors
  // of PeerWindow. The calls below REQUIRE it.
  void connect(Stream& s);
  Tensor bases_W() const;                          // i64: the addresses of the windows of all ranks
  std::vector<std::byte*> windows() const;         // the same addresses on the host; none on the null device
  Tensor sent_1() const;                           // i64: total bytes written to windows of other ranks
  void round(Stream& s, const RoundPlace& place);  // PeerWindow::round

 private:
  Array take(Shape shape, DType dtype);

  const MemoryPlan& plan_;
  Group& ranks_;
  bool shares_gpus_;  // ranks of etp x ep may share GPUs, even those that do not write to this window
  Tensor window_;     // u8
  int64_t num_bytes_ = 0;
  Array counts_, routes_, tokens_, grads_, back_, back_weights_;
  std::optional<PeerWindow> peers_;
};

// Declares the window that the MoE layers of a model share, for `dispatcher` (sizes.two_level is not read). Returns
// null if no window is needed: for other dispatchers, without MoE layers, or if a rank has all experts.
std::unique_ptr<DirectWindow> make_direct_window(MemoryPlan& plan, const Mesh& mesh, const DirectSizes& sizes,
                                                 DispatcherKind dispatcher, int64_t num_moe_layers);

}  // namespace moebius
