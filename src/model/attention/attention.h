// The interface of the attention of a decoder layer. The constructor of a block chooses grouped-query
// (model/attention/gqa.h) or latent attention (model/attention/mla.h). x and y [t, D] are this rank's rows of the
// residual stream.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "memory/saved_tensor.h"
#include "model/attention/row_blocks.h"
#include "model/layer_context.h"
#include "ops/norm/norm.h"

namespace moebius {

// The key-value cache of a layer in generation, for this rank's heads. Each sequence has max_tokens rows in it.
struct KvCache {
  Tensor k_UGd, v_UGd;  // U = sequences * max_tokens
};

// A run of consecutive tokens of one sequence, at positions [first, first + count).
struct CachedRun {
  int64_t sequence = 0;
  int64_t first = 0, count = 1;
};
// The rows of a pass of generation: one run of each of several sequences.
struct CachedRows {
  std::span<const CachedRun> runs;  // their counts sum to the rows of all tp ranks
  int64_t max_tokens = 0;           // rows of a sequence in the cache
  // Returns whether each run is one token (decoding), as after the prompts (prefill).
  bool are_single() const {
    return std::all_of(runs.begin(), runs.end(), [](const CachedRun& run) { return run.count == 1; });
  }
};

class Attention {
 public:
  // The tensors that forward saves for the backward passes of a micro-batch. Each kind of attention derives its own.
  struct Saved {
    virtual ~Saved() = default;
  };
  virtual ~Attention() = default;
  virtual std::unique_ptr<Saved> declare_saved(MemoryPlan& plan, const std::string& prefix) const = 0;

  virtual void forward(Step& step, Tensor y_tD, Tensor x_tD, Saved& saved) const = 0;
  // Returns the x of forward, recomputed on the step stack if it was not kept. Each call recomputes it.
  using Input = std::function<Tensor()>;
  // Recomputes what forward did not keep. Call it before a backward pass. Only where holds_input() is true it leaves x
  // on the step stack; elsewhere set_input() says where x is, before backward_weight(). A long sequence holds neither x
  // nor the output of the projection (model/layers/row_chunks.h), and backward_input() recomputes them again.
  virtual void recompute(Step& step, const Input& x, Saved& saved) const = 0;
  virtual bool holds_input(const Saved& saved) const = 0;
  virtual void set_input(Tensor x_tD, Saved& saved) const = 0;
  // Computes y from the outputs of the heads: the last part of forward.
  virtual void output(Step& step, Tensor y_tD, const Saved& saved) const = 0;
  // The derivatives w.r.t. x, in the caller's scope of the step stack, which must not end before sum.wait(). They may
  // be read after that.
  struct InputGradient {
    Tensor dx_tD;
    RowsInFlight sum = {};  // over the tp ranks
  };
  // Without with_dx the result is empty, but all that backward_weight needs is computed. The sum overlaps with
  // backward_weight() if that is called before sum.wait().
  virtual InputGradient backward_input(Step& step, Tensor dy_tD, Saved& saved, bool with_dx, const Input& x) const = 0;
  virtual void backward_weight(Step& step, const Saved& saved) const = 0;

  // Generation. x is norm.y, which this computes: this rank's rows of the runs, whose earlier tokens are cached. Adds
  // the keys and values of the runs to the cache. The result of a run does not depend on the other runs.
  virtual void forward_cached(Step& step, Tensor y_tD, const RmsNormFwd& norm, const KvCache& cache,
                              const CachedRows& rows) const = 0;
  // num_tokens: U, of all sequences.
  virtual void declare_cache(MemoryPlan& plan, const std::string& prefix, int64_t num_tokens, KvCache& cache) const = 0;

  // Returns the saved tensors for diagnosis, in the order in which they were computed.
  virtual std::vector<KeptTensor> kept(const Saved& saved) const = 0;
};

// Makes the attention of a layer of c.model. The names of its parameters begin with prefix.
std::unique_ptr<Attention> make_attention(const LayerContext& c, const std::string& prefix, int64_t layer);

}  // namespace moebius
