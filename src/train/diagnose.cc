#include "train/diagnose.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "ops/elementwise/elementwise.h"

namespace moebius {
namespace {

// Returns the first element that is not finite, or -1. Of quantised weights only E4M3 can have such elements, since
// scales were checked when they were read.
int64_t first_nonfinite(Stream& s, const Tensor& t) {
  if (t.dtype == DType::f32 || t.dtype == DType::bf16) return find_nonfinite(s, t);
  if (t.dtype != DType::f8_e4m3) return -1;
  std::vector<std::byte> codes(t.num_bytes());
  copy_to_host(s, codes.data(), t.data, t.num_bytes());
  const auto is_nan = [](std::byte code) { return (code & std::byte{0x7f}) == std::byte{0x7f}; };
  const auto at = std::find_if(codes.begin(), codes.end(), is_nan);
  return at == codes.end() ? -1 : at - codes.begin();
}

std::optional<std::string> first_in(Stream& s, const std::string& name, const Tensor& t) {
  const int64_t at = first_nonfinite(s, t);
  if (at < 0) return std::nullopt;
  return fmt::format("{} {}, element {}", name, to_string(t), at);
}

std::optional<std::string> first_in_weights(Stream& s, const Model& model) {
  for (const Param& p : model.params().all()) {
    const Tensor w = p.is_quantised() ? p.master() : p.shards_weights() ? p.owned_weights() : p.w;
    if (auto found = first_in(s, "weight " + p.spec.name, w)) return found;
  }
  return std::nullopt;
}

std::optional<std::string> first_in_activations(Stream& s, const Model& model, size_t virtual_stage) {
  for (const auto& [name, tensor] : model.kept_tensors(virtual_stage)) {
    if (auto found = first_in(s, name, tensor)) return found;
  }
  return std::nullopt;
}

// Gradients appear from the last parameter to the first.
std::optional<std::string> first_in_gradients(Stream& s, const Model& model, size_t virtual_stage) {
  const ParamSpan span = model.params_of(virtual_stage);
  for (size_t i = span.end; i-- > span.begin;) {
    const Param& p = model.params().all()[i];
    if (!p.has_grad) continue;
    if (auto found = first_in(s, "gradient of " + p.spec.name, p.shards_gradient() ? p.owned_gradient() : p.grad()))
      return found;
  }
  return std::nullopt;
}

// Returns the finding of the first rank that has one, the same on every rank. Ranks continue together, or
// end together.
std::optional<std::string> agree(Control& control, const std::optional<std::string>& found, Pass pass = Pass::forward) {
  const std::vector<std::string> all = control.gather(found.value_or(""));
  for (size_t i = 0; i < all.size(); ++i) {
    const size_t r = pass == Pass::forward ? i : all.size() - 1 - i;
    if (!all[r].empty()) return all.size() == 1 ? all[r] : fmt::format("{} on rank {}", all[r], r);
  }
  return std::nullopt;
}

// A forward pass runs through the virtual stages, and through the ranks of each in order; a backward pass
// runs in reverse.
std::optional<std::string> first_of_forward(Stream& s, const Model& model, Control& control) {
  for (size_t v = 0; v < model.stages().size(); ++v) {
    if (auto found = agree(control, first_in_activations(s, model, v))) return found;
  }
  return std::nullopt;
}

std::optional<std::string> first_of_backward(Stream& s, const Model& model, Control& control) {
  for (size_t v = model.stages().size(); v-- > 0;) {
    if (auto found = agree(control, first_in_gradients(s, model, v), Pass::backward_input)) return found;
  }
  return std::nullopt;
}

}  // namespace

std::string find_first_nonfinite(Engine& engine, Loader& loader, Control& control) {
  engine.finish_update();
  Stream s = engine.stream();
  Model& model = engine.model();
  if (auto found = agree(control, first_in_weights(s, model))) return *found;
  model.params().zero_grads(s);
  for (int64_t m = 0; m < engine.spec().num_micro_batches; ++m) {
    loader.fill(engine.batch(), m);
    engine.forward_backward();
    if (auto found = first_of_forward(s, model, control))
      return fmt::format("{} in the forward pass of micro-batch {}", *found, m);
    if (auto found = first_of_backward(s, model, control))
      return fmt::format("{} in the backward pass of micro-batch {}", *found, m);
  }
  return "only the global gradient norm: "
         "every weight, activation and gradient of the replayed step is finite, their squares overflow";
}

}  // namespace moebius
