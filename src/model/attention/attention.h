// The attention of a decoder layer: grouped-query (model/attention/gqa.h) or latent
// (model/attention/mla.h), chosen once when a block is made. x and y are this rank's
// rows t of the residual stream.
#pragma once

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "memory/saved_tensor.h"
#include "model/layer_context.h"

namespace moebius {

// Keys and values of the tokens so far, for generation. Each sequence has room for max tokens, one
// sequence after the other; for this rank's heads.
struct KvCache {
  Tensor k_UGd, v_UGd;  // [sequences * max tokens, G, d]
};

// The rows of a pass of generation: runs of tokens, each of another sequence.
struct CachedRun {
  int64_t sequence = 0;
  int64_t first = 0, count = 1;  // the tokens at positions [first, first + count)
};
struct CachedRows {
  std::span<const CachedRun> runs;  // their counts sum to the rows of all tp ranks
  int64_t max_tokens = 0;           // of a sequence
  // Returns whether each run is one token, which is the case once prompts are fed.
  bool are_single() const {
    return std::all_of(runs.begin(), runs.end(), [](const CachedRun& run) { return run.count == 1; });
  }
};

class Attention {
 public:
  // The tensors that forward leaves for the backward passes of a micro-batch. Each kind
  // has its own.
  struct Saved {
    virtual ~Saved() = default;
  };
  virtual ~Attention() = default;
  virtual std::unique_ptr<Saved> declare_saved(MemoryPlan& plan, const std::string& prefix) const = 0;

  virtual void forward(Step& step, Tensor y_tD, Tensor x_tD, Saved& saved) const = 0;
  // Recomputes what forward did not keep. Call it before a backward pass, with the same x.
  virtual void recompute(Step& step, Tensor x_tD, Saved& saved) const = 0;
  // The end of forward: y, from the heads' outputs.
  virtual void output(Step& step, Tensor y_tD, const Saved& saved) const = 0;
  // dx may be empty: then it is not computed, and the rest is, for backward_weight.
  virtual void backward_input(Step& step, Tensor dx_tD, Tensor dy_tD, Saved& saved) const = 0;
  virtual void backward_weight(Step& step, const Saved& saved) const = 0;

  // Generation: x are this rank's rows of the runs, whose earlier tokens are cached; the keys and
  // values of the runs are added to the cache. A run is computed as it would be alone.
  virtual void forward_cached(Step& step, Tensor y_tD, Tensor x_tD, const KvCache& cache,
                              const CachedRows& rows) const = 0;
  // num_tokens: of all sequences.
  virtual void declare_cache(MemoryPlan& plan, const std::string& prefix, int64_t num_tokens, KvCache& cache) const = 0;

  // For diagnosis, in the order they were computed.
  virtual std::vector<KeptTensor> kept(const Saved& saved) const = 0;
};

// The attention of a layer of c.model, whose parameters begin with prefix.
std::unique_ptr<Attention> make_attention(const LayerContext& c, const std::string& prefix, int64_t layer);

}  // namespace moebius
