// How tokens reach their experts and come back. The experts of a layer lie over the ranks of
// etp x ep: ep rank j has the experts [j E/EP, (j + 1) E/EP), and each etp rank of it 1/ETP
// of their inner width F. So a row goes to all etp ranks of its expert, and what they return
// is summed. Implementations differ in how rows travel; what a layer computes does not.
//   local        every expert lives here: nothing is moved, rows are read through the index
//   all-gather   every rank gets the tokens and routes of all W = ETP EP ranks and takes what is for its
//                experts; results are reduce-scattered. No count is read back: it may be part of a recorded step.
//   all-to-all   a row travels to its expert's ranks alone. A library wants the sizes on the host: it reads its counts
//                back, once a layer and micro-batch and behind the gather of the rows to send, and cannot be recorded.
// All ranks of etp x ep call the same, each with as many tokens (all-to-all: any number). Experts and ranks that no
// token chose take the same path.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/mesh.h"
#include "model/step.h"
#include "ops/experts/experts.h"
#include "ops/routing/routing.h"

namespace moebius {

// What the experts here work on: rows of `source`, read through rows.token. They are sorted by expert, within an expert
// by the rank that they come from and there by token.
struct Dispatched {
  Tensor source;  // [*, D]
  Rows rows;
  Tensor weight_R;  // f32, each row's weight in its token's sum; of combine_bwd alone where rows travel
};

// A route, and what its rows are here: what the calls of a dispatcher share. Kept from forward to backward.
struct Delivery {
  Route route;  // of the tokens here
  Rows rows;    // of the experts here
  // all-gather: of the N = W T tokens of all ranks
  Tensor row_pair_R, pair_row_NK, weight_NK;
  // all-to-all
  Tensor counts_WE, row_R;                    // rows of each rank for each expert; row of an arrival
  HostBuffer counts;                          // the same on the host
  std::vector<int64_t> send_rows, recv_rows;  // to and from each rank, once the counts are here
};

struct DispatcherSpec {
  int64_t num_experts = 1, top_k = 1;  // of the layer: E and K
  int64_t max_tokens = 1;              // T of a rank
  const Mesh* mesh = nullptr;          // outlives the dispatcher
  double rows_factor = 0;              // > 0: rows planned for a rank's experts, over the even share (all-to-all alone)
};

class Dispatcher {
 public:
  virtual ~Dispatcher() = default;
  // Rows that the experts here may get of T tokens a rank, whatever these choose, or with rows_factor the bound that
  // was asked for. Buffers of rows have this many.
  virtual int64_t max_rows(int64_t T) const = 0;
  // Declares what a delivery keeps; it stays where it is until the plan is bound.
  virtual void declare_saved(MemoryPlan& plan, const std::string& prefix, Delivery& delivery) const = 0;

  // Tells the ranks of the experts what comes. Fills delivery.
  virtual void announce(Step& step, const Route& route, Delivery& delivery) const = 0;
  // Tokens to experts. Views may stand on the step stack: the caller's scope must include their use.
  virtual Dispatched dispatch(Step& step, Tensor x_TD, Delivery& delivery) const = 0;
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

// The dispatcher that `asked` ("auto", "allgather", "alltoall") names on this mesh. One rank of etp x ep: local. auto:
// all-gather where it sends no more than all-to-all, which is EP <= K; else all-to-all. Error{usage} for other names,
// and for a bound on rows where counts are not read.
// REQUIRES: ep divides E.
std::unique_ptr<Dispatcher> make_dispatcher(const std::string& asked, const DispatcherSpec& spec);

}  // namespace moebius
