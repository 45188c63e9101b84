#include "plan/cost/launches.h"

#include <array>
#include <string_view>
#include <utility>

namespace moebius {

int64_t kernels_of(const std::string& op) {
  using Entry = std::pair<std::string_view, int64_t>;
  static constexpr std::array<Entry, 14> several{
      Entry{"attention_bwd", 3},      // row sums and the gradients; a third one rounded dq when shares were fitted
      Entry{"balance_stats", 2},      // sums of chunks, and of these
      Entry{"d_expert_down", 2},      // the product, and the sums of the routing weights' gradients
      Entry{"embedding_bwd", 2},      // tokens are sorted first
      Entry{"expert_wgrad", 2},       // experts without rows are cleared first
      Entry{"index_rows", 3},         // counts, their sums, and places
      Entry{"lm_loss", 4},            // three products, and the loss between them
      Entry{"qk_norm_bwd", 3},        // rows, and the gradients of both weights
      Entry{"rms_norm_bwd", 2},       // rows, and the gradient of the weight
      Entry{"rope_bwd", 2},           // the same of the norm before it
      Entry{"route_fwd", 3},          // choices, sums of counts, and places
      Entry{"router_logits_bwd", 5},  // dlogits and weights in parts, two products, and sums of dw
      Entry{"router_logits_fwd", 2},  // weights in parts, and the product
      Entry{"sum_squares", 2},        // sums of parts, and of these
  };
  for (const auto& [name, kernels] : several)
    if (op == name) return kernels;
  return 1;
}

}  // namespace moebius
