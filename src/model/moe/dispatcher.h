// A Dispatcher moves the rows of tokens to their experts and back. The experts of a layer are spread over the ranks of
// etp x ep: ep rank j has the experts [j E/EP, (j + 1) E/EP), and each of its etp ranks has 1/ETP of their inner width
// F. So a row is sent to all etp ranks of its expert, and the results that they return are summed. All dispatchers
// compute the same layer; they differ in the messages that they send.
//   local        Every expert is on this rank. Nothing is moved; rows are read through the index.
//   all-gather   Every rank gets the tokens and routes of all W = ETP EP ranks, and computes the rows of its
//                experts. The results are reduce-scattered. The host reads no counts, so a CUDA graph may
//                capture it.
//   direct       A token is written once into the memory of each rank that has any of its experts, and each of
//                these returns one sum. The host reads no counts, so a CUDA graph may capture it. The ranks
//                must be able to write to each other's memory, so they are on one machine.
//   two-level    For ranks on several nodes: a token is sent once to each node that has any of its experts, and
//                written to the ranks of that node as with direct. The host reads the counts of messages; while a
//                CUDA graph is captured, messages have fixed sizes instead.
//   all-to-all   A row is sent only to the ranks of its expert. The host needs the sizes of the exchange, so it
//                reads the counts once per layer and micro-batch, after the rows to send are gathered. It
//                cannot be captured.
// All ranks of etp x ep make the same calls, even if no token chose their experts. Each of them has the same number
// of tokens, except with all-to-all.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/mesh.h"
#include "config/parallel_spec.h"
#include "model/side_work.h"
#include "model/step.h"
#include "ops/dispatch/row_distances.h"
#include "ops/experts/experts.h"
#include "ops/routing/routing.h"

namespace moebius {

// The rows of this rank's experts: rows of `source`, read through rows.token. They are sorted by expert, then by the
// rank that they come from, then by token.
struct Dispatched {
  Tensor source;    // [source_rows, D], in the dtype of the tensor that was sent
  Rows rows;        // the offsets of each expert, and the index of each row in source
  Tensor weight_R;  // f32, each row's weight in its token's sum; only from combine_bwd
};

// The state of one micro-batch that the calls of a dispatcher share, kept from forward to backward: above all the
// routing. DeepEP calls it a handle too. Each dispatcher derives its own type, which declare_saved() makes.
struct DispatchHandle {
  virtual ~DispatchHandle() = default;
  Route route;  // the route of this rank's tokens
  Rows rows;    // the rows of this rank's experts; not set by the local dispatcher
};

class DirectWindow;
class ExpertRows;

struct DispatcherSpec {
  int64_t num_experts = 1, top_k = 1;  // E and K of the layer
  int64_t max_tokens = 1;              // T of a rank
  const Mesh* mesh = nullptr;          // outlives the dispatcher
  double rows_factor = 0;              // moe.rank_rows_factor, only with all-to-all; 0: the worst case is planned
  DirectWindow* window = nullptr;      // for direct and two-level; outlives the dispatcher (model/moe/direct_window.h)
  const ExpertRows* rows = nullptr;    // memory for arriving rows; outlives the dispatcher. null: the step stack
  bool round_robin = false;            // moe.force_balance; it changes the expected rows in costs, not the routing
  bool sends_all = false;              // direct: every token goes to all ranks. REQUIRES: ep <= top_k
  bool fixed_messages = false;         // two-level: eager calls send messages of the same sizes as captured ones
  std::string layer;                   // a name for messages: "model.layers.3.mlp"
};

class SplitDispatcher;

class Dispatcher {
 public:
  virtual ~Dispatcher() = default;
  // Returns this dispatcher if it can send the rows for other ranks separately from this rank's own rows, else null.
  virtual const SplitDispatcher* split() const { return nullptr; }
  // Returns the maximum number of rows of this rank's experts if each rank has T tokens: for any routing, or with
  // rows_factor the bound that it sets. Buffers of rows have this many.
  virtual int64_t max_rows(int64_t T) const = 0;
  // Returns the rows of Dispatched::source for T tokens on each rank.
  virtual int64_t source_rows(int64_t T) const = 0;
  // Makes the handle of one micro-batch, and declares its tensors. The calls below REQUIRE a handle that this
  // dispatcher made.
  virtual std::unique_ptr<DispatchHandle> declare_saved(MemoryPlan& plan, const std::string& prefix) const = 0;

  // Returns the number of multiprocessors that dispatch() and combine_bwd() need on a GPU, if they overlap with other
  // work of it.
  virtual int sending_multiprocessors(const Step&) const { return SideWork::kMultiprocessors; }

  // Exchanges the routing: each rank learns which rows its experts get. Fills the handle.
  virtual void announce(Step& step, const Route& route, DispatchHandle& handle) const = 0;
  // Sends tokens to their experts. x: [T, D]. The result may be on the step stack.
  virtual Dispatched dispatch(Step& step, Tensor x_TD, DispatchHandle& handle) const = 0;
  // Sends an i32 index of each token, as dispatch() sent the tokens: all[i] is the index of row i of the source.
  // all_N has source_rows(T) elements. Call it after dispatch().
  virtual void dispatch_index(Step& step, Tensor all_N, Tensor index_T, DispatchHandle& handle) const = 0;
  // Returns the results of the experts to their tokens, and writes
  //   y[t] = sum over k of weight[t,k] * (row of pair (t,k), summed over etp)
  virtual void combine(Step& step, Tensor y_TD, Tensor y_RD, DispatchHandle& handle) const = 0;
  // Sends dy of the tokens to their experts, like dispatch(), with the weight of each row.
  virtual Dispatched combine_bwd(Step& step, Tensor dy_TD, DispatchHandle& handle) const = 0;
  // Returns the gradients of rows to their tokens, and those of weights (f32) to their pairs. Both are summed over
  // etp, and written:
  //   dx[t] = sum over k of (dx of the row of pair (t,k))
  virtual void dispatch_bwd(Step& step, Tensor dx_TD, Tensor dweight_TK, Tensor dx_RD, Tensor dweight_R,
                            DispatchHandle& handle) const = 0;
};

// Calls for parallel.expert_overlap = "batch_split": some rows are computed while others are exchanged. Call
// announce() before them, as before the calls above. All ranks make the same calls, with the same distances.
class SplitDispatcher : public Dispatcher {
 public:
  const SplitDispatcher* split() const final { return this; }
  // The rows at some distances (ops/dispatch/row_distances.h).
  struct Part {
    RowDistances of;
    RowPart rows;  // two runs of each expert, or one for this rank's own rows
  };
  // The parts of the rows, on the step stack: this rank's own, and one or two of other ranks, by rising distances.
  // own_rows index this rank's tokens, and rows index the source of dispatch_part().
  struct Parts {
    Rows own_rows, rows;
    Part own;
    std::vector<Part> others;
  };
  // Returns the parts of the rows that were announced. T: tokens of this rank.
  virtual Parts parts(Step& step, int64_t T, const DispatchHandle& handle) const = 0;
  // Like dispatch() and combine_bwd(), but they send only the rows at these distances. The source also has the rows
  // of earlier calls, and its other rows are undefined. weight_R is empty; row_weights() returns it.
  virtual Dispatched dispatch_part(Step& step, Tensor x_TD, const RowDistances& of, DispatchHandle& handle) const = 0;
  virtual Dispatched combine_bwd_part(Step& step, Tensor dy_TD, const RowDistances& of,
                                      DispatchHandle& handle) const = 0;
  // combine() in several calls: return_part() for each part, which reads only the rows of that part in y. At last
  // sum_returned(). The call for this rank's own rows needs no other rank, and may overlap with another call.
  virtual void return_part(Step& step, Tensor y_RD, int64_t T, const RowDistances& of,
                           DispatchHandle& handle) const = 0;
  virtual void sum_returned(Step& step, Tensor y_TD, DispatchHandle& handle) const = 0;
  // Returns weight_R of combine_bwd(), f32 [R] on the step stack. It may be called before combine_bwd().
  virtual Tensor row_weights(Step& step, int64_t T, const DispatchHandle& handle) const = 0;
};

// Returns the group of the ranks that share the experts of a layer: ep, or etp x ep.
Group& group_of_experts(const Mesh& mesh);

// Makes a dispatcher of this kind. With one rank of etp x ep it is local, whatever the kind is.
// Throws Error{usage} for rows_factor with a dispatcher that does not read counts, for direct and two-level without a
// window, and for two-level as check_nodes() does (config/dispatcher_choice.h). Throws Error{internal} for automatic on
// several ranks, since resolve_dispatcher() chooses before. REQUIRES: ep divides E.
std::unique_ptr<Dispatcher> make_dispatcher(DispatcherKind kind, const DispatcherSpec& spec);

}  // namespace moebius
