// Two-level: dispatch between ranks on several nodes. A token is sent once to each node that has any of its experts, by
// a message. The rank that receives it writes it into the memory of the ranks of its node, as with
// model/moe/dispatchers/dispatcher_direct.h.
//
// The W = M n ranks of etp x ep are on M nodes of n ranks each (MeshShape::nodes_of_experts). Rank (m, i) is the i-th
// of node m. It exchanges messages with the ranks (0, i), ..., (M - 1, i), which are its rail. It writes to the windows
// (model/moe/direct_window.h) of its node.
//
//   announce      A rank sends each rank of its rail the number of tokens that it will get. The host reads these
//                 counts, since messages have sizes. The experts and weights of the tokens follow. Each rank then has
//                 tokens of M ranks, and announces them in its node as DirectDispatcher does, separately for each node
//                 of origin.
//   dispatch      A row is sent to one rank of each node that needs it, which writes it to the ranks of its experts.
//   combine       The rank of the experts returns a sum over k for each token. The rank that received the token adds
//                 these in the order of the ranks, and sends back the sum of the node. The token's rank adds the sums
//                 of the nodes.
//   backward      The same calls with the same places.
//
// Sums of nodes are f32, on the wire too. A sum runs over k, then over the ranks of a node, then over the nodes, as
// the sums of the group do over its levels (comm/collective_levels.h). So the bits are those of the all-gather
// dispatcher. With more than 8 nodes the nodes have levels too: blocks of nodes, and blocks of such blocks. Rows are
// ordered by the rank of their token, then by token, whichever rank received them first.
//
// While a CUDA graph is captured no count can be read. Then no counts are sent, and a message has T rows, one for each
// token of a rank. The routes of unused rows are zeros, which choose no expert. Unused rows are sent, but no rank reads
// them, and nothing is written to windows for them. So the bits are the same. Only captured calls send such messages:
// the eager steps of a run send messages of exact sizes.
//
// With T tokens per rank, n_a rows that it sends to other nodes, and m_a rows that it received from them, a rank sends
// across nodes in each call
//   announce  (M - 1) 4 + n_a 8 K bytes    dispatch, combine_bwd  n_a D elements
//   combine   m_a D 4 bytes                dispatch_bwd           m_a (D 4 + 4 K) bytes
// With fixed messages n_a and m_a are (M - 1) T, and no count is sent.
// Inside its node it sends what direct sends in a group of n ranks, M times.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/collective_levels.h"
#include "model/moe/direct_window.h"
#include "model/moe/dispatcher.h"

namespace moebius {

struct TwoLevelHandle final : DispatchHandle {
  // The rows of this rank's tokens for all nodes are one array, sorted by node, then by token; those for this node come
  // last. node_row[g,t,a] is the place in it of token t's row for its a-th node, if that is in block g of the G blocks
  // of nodes, else -1. A token has rows for at most A = min(K, M) nodes. The sums of a block's nodes are added first.
  Tensor node_row_GTA;
  // The number of rows of the messages to and from each node, on the host. For this node both are equal.
  std::vector<int64_t> send_rows, recv_rows;
  // Places of the N = M T tokens that come from the rail, a section of T for each node: ops/dispatch/dispatch.h.
  Tensor topk_NK, dest_NJ, row_NJ, back_row_NB;
  // The same as in DirectHandle, for the W T rows that may arrive: a section of n T for each node. A row has at most
  // L = min(K, e) pairs.
  Tensor arrive_Mn1, back_Mn;
  Tensor pair_row_NL, weight_NL;  // [W T, L]
  bool has_begun = false;         // as in DirectHandle
};

class TwoLevelDispatcher final : public Dispatcher {
 public:
  // Throws Error{usage} without a window, and as check_nodes() says.
  explicit TwoLevelDispatcher(const DispatcherSpec& spec);
  int64_t max_rows(int64_t T) const override;
  int64_t source_rows(int64_t T) const override { return M_ * n_ * T; }
  std::unique_ptr<DispatchHandle> declare_saved(MemoryPlan& plan, const std::string& prefix) const override;
  void announce(Step& step, const Route& route, DispatchHandle& handle) const override;
  Dispatched dispatch(Step& step, Tensor x_TD, DispatchHandle& handle) const override;
  void dispatch_index(Step& step, Tensor all_N, Tensor index_T, DispatchHandle& handle) const override;
  void combine(Step& step, Tensor y_TD, Tensor y_RD, DispatchHandle& handle) const override;
  Dispatched combine_bwd(Step& step, Tensor dy_TD, DispatchHandle& handle) const override;
  void dispatch_bwd(Step& step, Tensor dx_TD, Tensor dweight_TK, Tensor dx_RD, Tensor dweight_R,
                    DispatchHandle& handle) const override;

 private:
  // Rows of the tokens that the rail has sent: for each node the rows that arrived from it.
  using Sections = std::vector<Tensor>;

  void find_nodes(Step& step, TwoLevelHandle& handle) const;
  void exchange_counts(Step& step, const Tensor& count_M, TwoLevelHandle& handle) const;
  void announce_in_node(Step& step, const Sections& routes, TwoLevelHandle& handle) const;
  // Returns whether messages have T rows, since the host cannot read counts.
  bool has_fixed_messages(const Stream& s) const;
  int64_t sorted_rows(const Stream& s, int64_t T) const;  // rows of an array that is sorted by node
  Tensor node_rows(int64_t T, const TwoLevelHandle& handle) const;
  // Computes out = the sum over the nodes of a block of a level, of f32 rows that are sorted by node.
  void sum_over_block(Step& step, const Tensor& out_TC, const Tensor& sorted_SC, int level, int64_t block,
                      const TwoLevelHandle& handle) const;
  // Sends rows of this rank's tokens to its rail, and receives those of the rail. The results are on the step stack.
  enum class Unused { undefined, zero };  // rows of messages that no token has
  Sections send_across(Step& step, const char* phase, const Tensor& x_TC, const TwoLevelHandle& handle,
                       Unused unused) const;
  Sections sections(const Tensor& sorted_SC, const Tensor& arrived_NC, const TwoLevelHandle& handle) const;
  std::vector<int64_t> of_others(std::vector<int64_t> rows) const;  // returns rows with 0 for this node
  // `in` has the rows for each node, and `out` gets those from each, both in the order of the nodes. phase: the name of
  // the exchange in messages.
  struct RailExchange {
    const char* phase = "";
    Tensor out, in;
    std::vector<int64_t> recv_rows, send_rows;
  };
  // Throws the error of another rank that failed or did not join, after the phase and the layer.
  void exchange(Stream& s, const RailExchange& a) const;
  void exchange_messages(Stream& s, const RailExchange& a) const;
  void push(Step& step, const DirectWindow::Array& to, const Sections& x, int64_t T,
            const TwoLevelHandle& handle) const;
  Dispatched bring(Step& step, const DirectWindow::Array& to, const char* phase, const Tensor& x_TD,
                   TwoLevelHandle& handle) const;
  void return_sums(Step& step, Tensor y_RD, Tensor weight_NL, int64_t T, const TwoLevelHandle& handle) const;
  // Returns the number of sums that a rank returns for the tokens of a rank of its rail, with balanced routing.
  int64_t even_sums(int64_t T) const;
  // Compute out[t] = the sum over the nodes of the sums that the ranks of each node returned for token t.
  void rows_over_nodes(Step& step, const char* phase, Tensor out_TD, const TwoLevelHandle& handle) const;
  void pairs_over_nodes(Step& step, const char* phase, Tensor out_TK, const TwoLevelHandle& handle) const;
  // The common code of the two functions above. sum_of_node(m, sum) computes the sums of this node for the tokens that
  // came from node m, in f32.
  void sum_over_nodes(Step& step, const char* phase, Tensor out_TC,
                      const std::function<void(int64_t, const Tensor&)>& sum_of_node,
                      const TwoLevelHandle& handle) const;
  void round(Step& step, const char* phase) const;
  void begin(Step& step, TwoLevelHandle& handle) const;

  int rank_in_rail(int64_t node) const { return static_cast<int>(node * n_ + place_); }
  // Returns the rows of a handle's tensor that belong to the tokens of a node, which has T or n T of them.
  static Tensor section(const Tensor& x, int64_t node, int64_t rows) { return x.rows(node * rows, (node + 1) * rows); }

  DispatcherSpec spec_;
  Group& ranks_;
  CollectiveLevels levels_;  // the levels of ranks_
  DirectWindow& window_;
  int64_t etp_, e_, n_, M_, P_;  // P: ep ranks of a node
  int64_t node_, place_;         // this rank's node, and its place in it
  int64_t A_, J_, L_;
  int block_level_;     // of levels_: the first one that exchanges between nodes
  int64_t block_size_;  // nodes of a block at that level
};

}  // namespace moebius
