// How tokens reach their experts and come back. The experts of a layer are spread over the
// ranks of etp x ep. ep rank j has the experts [j E/EP, (j + 1) E/EP), and each etp rank of it
// has 1/ETP of their inner width F. So a row goes to all etp ranks of its expert, and the rows
// that they return are summed. Dispatchers differ in how rows travel. They do not differ in
// the values that a layer computes.
//   local        Every expert is on this rank. Nothing is moved; rows are read through the index.
//   all-gather   Every rank gets the tokens and routes of all W = ETP EP ranks, and takes the rows of
//                its experts. Results are reduce-scattered. No count is read back, so it may be part of
//                a CUDA graph.
//   direct       A token is written once into the memory of each rank that has any of its experts, and each of them
//                returns one sum. No count is read back, so it may be part of a CUDA graph. The ranks must reach
//                each other's memory: they are on one machine.
//   two-level    The ranks are on several nodes. A token travels once to each node that has any of its experts, by a
//                message, and inside the node as with direct. The counts of messages are read back, so it cannot be
//                captured. On CPUs only.
//   all-to-all   A row travels to its expert's ranks alone. The exchange needs its sizes on the host,
//                so the counts are read back once a layer and micro-batch, after the gather of the rows
//                to send. It cannot be captured.
// All ranks of etp x ep make the same calls, each with the same number of tokens (all-to-all: any
// number). Experts and ranks that no token chose make the same calls.
#pragma once

#include <memory>
#include <string>

#include "comm/mesh.h"
#include "config/parallel_spec.h"
#include "model/step.h"
#include "ops/experts/experts.h"
#include "ops/routing/routing.h"

namespace moebius {

// The rows that the experts here work on: rows of `source`, read through rows.token.
// They are sorted by expert. Within an expert they are sorted by the rank that they come
// from, and within a rank by token.
struct Dispatched {
  Tensor source;  // [*, D]
  Rows rows;
  Tensor weight_R;  // f32, each row's weight in its token's sum; where rows travel, only of combine_bwd
};

// A route and its rows here, which the calls of a dispatcher share. It is kept from forward to
// backward. Each dispatcher makes its own kind in declare_saved().
struct Delivery {
  virtual ~Delivery() = default;
  Route route;  // of the tokens here
  Rows rows;    // of the experts here; not filled where no row travels
};

class DirectWindow;
class ExpertRows;

struct DispatcherSpec {
  int64_t num_experts = 1, top_k = 1;  // of the layer: E and K
  int64_t max_tokens = 1;              // T of a rank
  const Mesh* mesh = nullptr;          // outlives the dispatcher
  double rows_factor = 0;              // > 0: rows planned for a rank's experts, over the even share (all-to-all alone)
  DirectWindow* window = nullptr;      // of direct and two-level, which outlives it (model/moe/direct_window.h)
  const ExpertRows* rows = nullptr;    // memory for rows that arrive, which outlives it; null: the step stack
  std::string layer;                   // a name for messages: "model.layers.3.mlp"
};

class Dispatcher {
 public:
  virtual ~Dispatcher() = default;
  // The largest number of rows that the experts here may get when each rank has T tokens,
  // whatever the tokens choose. With rows_factor it is the bound that was asked for.
  // Buffers of rows have this many.
  virtual int64_t max_rows(int64_t T) const = 0;
  // Rows of Dispatched::source for T tokens a rank.
  virtual int64_t source_rows(int64_t T) const = 0;
  // Declares and makes the delivery of one micro-batch. All calls below need a
  // delivery that this dispatcher made.
  virtual std::unique_ptr<Delivery> declare_saved(MemoryPlan& plan, const std::string& prefix) const = 0;

  // Tells the ranks of the experts which rows will come. Fills delivery.
  virtual void announce(Step& step, const Route& route, Delivery& delivery) const = 0;
  // Tokens to experts. Views may be of the step stack: the caller's scope must include their use.
  virtual Dispatched dispatch(Step& step, Tensor x_TD, Delivery& delivery) const = 0;
  // Sends the index of each token as dispatch() sent the token: all[i] is that of row i of the source.
  // Both are i32, and all has source_rows(T) of them. It follows dispatch().
  virtual void dispatch_index(Step& step, Tensor all_N, Tensor index_T, Delivery& delivery) const = 0;
  // y[t] = sum over k of weight[t,k] * the row of pair (t,k), summed over etp.
  virtual void combine(Step& step, Tensor y_TD, Tensor y_RD, Delivery& delivery) const = 0;
  // Gradients of the tokens' sums to the experts (the data path of dispatch).
  virtual Dispatched combine_bwd(Step& step, Tensor dy_TD, Delivery& delivery) const = 0;
  // Row gradients go back to tokens: dx[t] = sum over k of dx_row. The weights' gradients go back to pairs.
  // Both are summed over etp.
  virtual void dispatch_bwd(Step& step, Tensor dx_TD, Tensor dweight_TK, Tensor dx_RD, Tensor dweight_R,
                            Delivery& delivery) const = 0;
};

// The ranks that hold the experts of a layer: ep, or etp x ep.
Group& group_of_experts(const Mesh& mesh);

// Returns the dispatcher of a kind on this mesh. With one rank of etp x ep it is local, whatever the
// kind. Error{usage} for a bound on rows with a dispatcher that does not read counts.
// Error{usage} for two-level as check_nodes() says (config/dispatcher_choice.h), and without a window for it and direct.
// Error{internal} for automatic on several ranks: resolve_dispatcher() alone chooses
// (config/dispatcher_choice.h). REQUIRES: ep divides E.
std::unique_ptr<Dispatcher> make_dispatcher(DispatcherKind kind, const DispatcherSpec& spec);

}  // namespace moebius
