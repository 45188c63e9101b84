#include "plan/cost/launches.h"

#include <array>
#include <string_view>
#include <utility>

namespace moebius {

int64_t launches_of(const std::string& op, const LaunchesOfPass& pass) {
  if (op == "expert_wgrad") return pass.clears_experts ? 2 : 1;
  if (op == "rope_bwd") return pass.norms_in_rope ? 3 : 1;
  // dlogits and weights in parts, two products, and sums of dw; and of the bias, in parts and of these.
  if (op == "router_logits_bwd") return pass.biases_router ? 7 : 5;
  using Entry = std::pair<std::string_view, int64_t>;
  static constexpr std::array<Entry, 16> several{
      Entry{"attention_bwd", 3},      // row sums, cleared counters and all gradients; portable: row sums, dq, dk and dv
      Entry{"balance_stats", 2},      // sums of chunks, and of these
      Entry{"d_expert_down", 2},      // the product, and the sums of the routing weights' gradients
      Entry{"destinations", 2},       // places in a block, and in all blocks
      Entry{"embedding_bwd", 2},      // tokens are sorted first
      Entry{"index_routes", 2},       // places in a block, and in all blocks
      Entry{"index_rows", 2},         // the same
      Entry{"lm_logits_block", 2},    // the product, and figures of each row
      Entry{"lm_loss", 4},            // three products, and the loss between them
      Entry{"lm_loss_block", 3},      // the loss, and two products
      Entry{"qk_norm_block_bwd", 3},  // the gradients of both weights, and rows
      Entry{"rms_norm_bwd", 2},       // rows, and the gradient of the weight
      Entry{"route_fwd", 3},          // choices, sums of counts, and places
      Entry{"router_logits_fwd", 2},  // weights in parts, and the product
      Entry{"sum_rows", 2},           // sums of parts, and of these
      Entry{"sum_squares", 2},        // the same
  };
  for (const auto& [name, launches] : several)
    if (op == name) return launches;
  return 1;
}

}  // namespace moebius
